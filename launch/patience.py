"""Patience for plain `torchrun`: survivors get TTP_OT seconds for the dump instead of 30.

When a rank dies, torchrun sends SIGTERM to the others and, 30 seconds later, SIGKILL. With

    import mindio_tft_patch

in front of `from torch.distributed.run import main` in the torchrun script, they get TTP_OT. `ttprun` needs none of
this: it sends nothing at all while the survivors write.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

import wrapt

from mindio_tft_patch.config import Config

log = logging.getLogger("mindio_tft_patch.launch")

_OWN_LAUNCHER = "ttprun"
_RUN_MODULES = frozenset({"torch.distributed.run", "torch.distributed.launch"})
_MARK = "_mindio_tft_patience"


def _is_own(argv0: str, modules: Mapping[str, object], original: Sequence[str]) -> bool:
    return PurePath(argv0).stem == _OWN_LAUNCHER or f"mindio_tft_patch.launch.{_OWN_LAUNCHER}" in (
        _main_module(modules),
        _module_option(argv0, original),
    )


def _main_module(modules: Mapping[str, object]) -> str:
    """Name under which `python -m` runs the main program; empty for a script."""
    return getattr(getattr(modules.get("__main__"), "__spec__", None), "name", None) or ""


def _module_option(argv0: str, original: Sequence[str]) -> str:
    """The module of `python -m`, while Python is still importing it (sys.argv[0] is "-m" then)."""
    if argv0 != "-m" or "-m" not in original:
        return ""
    following = original[original.index("-m") + 1 :]
    return following[0] if following else ""


def is_launcher_process(argv0: str, modules: Mapping[str, object], original: Sequence[str] = ()) -> bool:
    """Whether this process launches ranks, so that nothing of training must be patched in it.

    Args:
        argv0: sys.argv[0].
        modules: sys.modules; only the main module's name is looked at: a rank may import torch.distributed.run too.
        original: sys.orig_argv.
    """
    path = PurePath(argv0)
    if path.stem.startswith("torchrun") or _is_own(argv0, modules, original):
        return True
    if path.parts[-3:] in (("torch", "distributed", "run.py"), ("torch", "distributed", "launch.py")):
        return True
    return bool(_RUN_MODULES & {_main_module(modules), _module_option(argv0, original)})


def lengthen_patience(config: Config) -> bool:
    """Let torchelastic wait at least TTP_OT between SIGTERM and SIGKILL. Call it in a launcher process only.

    Returns:
        True when patience was lengthened now; False when it already was, or in ttprun, which must not differ from
        torchrun for a job that does not use the plugin.
    """
    if _is_own(sys.argv[0] if sys.argv else "", sys.modules, getattr(sys, "orig_argv", ())):
        return False
    from torch.distributed.elastic.multiprocessing.api import PContext

    if getattr(PContext, _MARK, False):
        return False
    patience_seconds = config.dump_timeout_seconds

    def patient(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def close(death_sig: Any = None, timeout: float = 30) -> Any:
            return wrapped(death_sig, max(timeout, patience_seconds))

        return close(*args, **kwargs)

    PContext.close = wrapt.FunctionWrapper(PContext.close, patient)
    setattr(PContext, _MARK, True)
    log.info("torchrun leaves ranks %g s between SIGTERM and SIGKILL", patience_seconds)
    return True
