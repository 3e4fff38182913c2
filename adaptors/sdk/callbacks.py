"""The callbacks of a framework: one table of kinds, and one mechanism for the fifteen functions that register them.

A kind says how its function is called and documented, and who calls the callback, where, and with what. The functions
themselves are made from the table (`register_functions`); each has the documented name, parameters and defaults.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mindio_tft_patch.adaptors.sdk import checks

_CONTROL = "the control thread"


@dataclass(frozen=True)
class Kind:
    """One kind of callback.

    Attributes:
        name: how we call it.
        function: name of the function that registers it.
        called: when, and on which rank.
        where: thread.
        arguments: of the callback.
        expected: of the callback.
        parameters: of the registering function, with the defaults of those that have one.
    """

    name: str
    function: str
    called: str
    arguments: str
    where: str = _CONTROL
    expected: str = "nothing; it raises when it fails"
    parameters: tuple[tuple[str, Any], ...] = (("func", inspect.Parameter.empty), ("ctx", None))

    @property
    def signature(self) -> inspect.Signature:
        """Parameters of the registering function."""
        return inspect.Signature(
            [
                inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
                for name, default in self.parameters
            ]
        )

    @property
    def documentation(self) -> str:
        """Docstring of the registering function."""
        return (
            f"Register the function that is called {self.called}.\n\n"
            f"It is called as function{self.arguments} on {self.where}, and returns {self.expected}.\n\n"
            "Raises:\n    TypeError: it cannot be called.\n"
        )


_NEVER = "never: training with fewer ranks is not part of this product"

KINDS: tuple[Kind, ...] = (
    Kind("rename", "tft_register_rename_handler", "on one rank when all ranks have saved", "(step, args)"),
    Kind(
        "save_ckpt",
        "tft_register_save_ckpt_handler",
        "on each rank that has a part in the dying-gasp checkpoint",
        "(step, save_info, args, ctx)",
        where="a thread of its own",
    ),
    Kind("exit", "tft_register_exit_handler", "under MindSpore when the job ends", "(ctx)"),
    Kind(
        "stop", "tft_register_stop_handler", "on every rank: the training thread is to raise FORCE STOP", "(args, ctx)"
    ),
    Kind(
        "clean",
        "tft_register_clean_handler",
        "on every rank when its training thread has left the training function",
        "(is_uce_error, args, ctx)",
        expected="0 (done), 1 (failed) or 2 (done; the model need not be rebuilt)",
    ),
    Kind(
        "rebuild_group",
        "tft_register_rebuild_group_handler",
        "on every rank, those that have come back included: build the process groups anew",
        "(fault_ranks, args, ctx)",
    ),
    Kind(
        "repair",
        "tft_register_repair_handler",
        "on the ranks that send or receive state",
        "(step, need_rebuild, error_ranks, repair_info, args, ctx)",
    ),
    Kind("rollback", "tft_register_rollback_handler", "on every rank: go back to `step`", "(step, args, ctx)"),
    Kind("stream_sync", "tft_register_stream_sync_handler", "when training holds after a step", "()"),
    Kind("zit_upgrade_rollback", "tft_register_zit_upgrade_rollback_handler", _NEVER, "(step, args, ctx)"),
    Kind(
        "zit_upgrade_repair",
        "tft_register_zit_upgrade_repair_handler",
        _NEVER,
        "(step, need_rebuild, error_ranks, repair_info, args, ctx)",
    ),
    Kind("zit_upgrade_rebuild", "tft_register_zit_upgrade_rebuild_handler", _NEVER, "(rank_list, args, ctx)"),
    Kind("zit_downgrade_rebuild", "tft_register_zit_downgrade_rebuild_handler", _NEVER, "(groups, ranks, args, ctx)"),
    Kind(
        "decrypt",
        "tft_register_decrypt_handler",
        "never: the control channel uses keys of its own, so that no private key has to be opened",
        "(cipher_text)",
        expected="the plain text",
        parameters=(("decryptor", inspect.Parameter.empty),),
    ),
    Kind(
        "exception",
        "tft_register_exception_handler",
        "when the message of an exception in training contains `fault_pattern`",
        "(message)",
        where="the training thread",
        expected="the name under which the fault is reported; fault_type is what that name stands for",
        parameters=tuple((name, inspect.Parameter.empty) for name in ("fault_pattern", "fault_type", "fault_handle")),
    ),
)
BY_NAME = {kind.name: kind for kind in KINDS}


@dataclass(frozen=True)
class Callback:
    """A registered function and its context."""

    function: Callable[..., Any]
    context: Any = None


class Callbacks:
    """What a framework has registered."""

    def __init__(self) -> None:
        self._registered: dict[str, Callback] = {}

    def register(self, name: str, function: Any, context: Any = None) -> None:
        """Register a function in place of the one before.

        Raises:
            TypeError: it cannot be called.
        """
        parameter = BY_NAME[name].parameters[0][0]
        checks.function(BY_NAME[name].function, parameter, function)
        self._registered[name] = Callback(function, context)

    def get(self, name: str) -> Callback | None:
        """What is registered for a kind; None: nothing."""
        return self._registered.get(name)

    def missing(self, *names: str) -> list[str]:
        """The registering functions of those kinds for which nothing is registered."""
        return [BY_NAME[name].function for name in names if name not in self._registered]


def register_functions(register: Callable[[str, Mapping[str, Any]], None]) -> dict[str, Callable[..., None]]:
    """The fifteen functions, by name.

    Args:
        register: called with the name of a kind and the arguments of the registering function.
    """
    return {kind.function: _function(kind, register) for kind in KINDS}


def _function(kind: Kind, register: Callable[[str, Mapping[str, Any]], None]) -> Callable[..., None]:
    signature = kind.signature

    def function(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        register(kind.name, bound.arguments)

    function.__name__ = function.__qualname__ = kind.function
    function.__doc__ = kind.documentation
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function
