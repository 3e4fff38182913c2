"""The table of patches of adaptors/megatron, aimed at what runs in a process of MindSpeed-LLM.

Its pretrain_gpt.py calls `pretrain` of mindspeed_llm.training.training, and that module's own `train` and
`training_log`. Everything else it takes from Megatron by name, after MindSpeed's patcher has replaced what it replaces;
those targets are resolved, and checked, when MindSpeed is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from mindio_tft_patch.adaptors.megatron import patches as megatron
from mindio_tft_patch.adaptors.megatron.session import Session
from mindio_tft_patch.adaptors.mindspeed_llm import refused
from mindio_tft_patch.adaptors.mindspeed_llm.feature import hide_switches
from mindio_tft_patch.config import MASTER_FLAG
from mindio_tft_patch.errors import ConfigError
from mindio_tft_patch.patching import Patch

_LOOP = "megatron.training.training"
_OWN_LOOP = "mindspeed_llm.training.training"
_MOVED = {f"{_LOOP}:{name}": f"{_OWN_LOOP}:{name}" for name in ("pretrain", "train", "training_log")}
_PARSER = "megatron.training.arguments:parse_args"


def table(session: Session, after_first_iteration: Callable[[], None]) -> list[Patch]:
    """Every patch, in the order of the adaptation points."""
    # MindSpeed-LLM's parser has the flags already, and refuses a second one of the same name.
    theirs = [patch for patch in megatron.table(session, after_first_iteration) if patch.target != _PARSER]
    return [*(replace(patch, target=_MOVED.get(patch.target, patch.target)) for patch in theirs), *_own()]


def _own() -> Iterator[Patch]:
    why = "MindSpeed-LLM's own code does not see the flags"
    yield Patch(1, _PARSER, _parse, why, ("extra_args_provider", "ignore_unknown_args"), mandatory=False)
    # Behind the check of adaptors/megatron, which sets the arguments to what the flags say.
    yield Patch(4, "megatron.training.arguments:validate_args", _validate, why, ("args",), mandatory=False)
    entry, why = _Entry(), "refuses scripts with another way into training"
    yield Patch(5, f"{_OWN_LOOP}:pretrain", entry.pretrain, why)
    yield Patch(5, f"{_OWN_LOOP}:train", entry.train, why)
    yield Patch(
        2,
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.step_with_ready_grads",
        _step,
        "an interrupted update leaves no half of MindSpeed's parameter all-gather behind",
        mandatory=False,
    )


class _Entry:
    """Training must be entered through pretrain(), whose end tells the controller that all is well."""

    def __init__(self) -> None:
        self._inside = False

    def pretrain(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wrapper of pretrain()."""
        self._inside = True
        try:
            return wrapped(*args, **kwargs)
        finally:
            self._inside = False

    def train(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wrapper of train().

        Raises:
            ConfigError: somebody else has called it, as posttrain_gpt.py does.
        """
        if not self._inside:
            raise ConfigError(
                f"{MASTER_FLAG}: of MindSpeed-LLM's scripts only pretrain_gpt.py can be protected.",
                change=f"Remove {MASTER_FLAG}, or set TFT_MINDSPEED=sdk.",
            )
        return wrapped(*args, **kwargs)


def _parse(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    arguments = wrapped(*args, **kwargs)
    hide_switches(arguments)
    return arguments


def _validate(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    arguments = wrapped(*args, **kwargs)
    refused.check(arguments)
    hide_switches(arguments)
    return arguments


def _step(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """For the time of an update MindSpeed binds `start_param_sync` of each chunk to dense or expert parameters."""
    try:
        return wrapped(*args, **kwargs)
    except BaseException:
        for chunk in instance.model_chunks:
            vars(chunk).pop("start_param_sync", None)
        raise
