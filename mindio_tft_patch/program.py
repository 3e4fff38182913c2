"""What kind of program imports the plugin: a training script, a launcher, or one of our own tools.

Known without importing torch, from the program's name alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import PurePath

_OWN_SCRIPTS = frozenset({"ttprun", "mindio-tft"})
_OWN_MODULES = frozenset(
    {
        "mindio_tft_patch.cli",
        "mindio_tft_patch.launch.demo",
        "mindio_tft_patch.launch.prepare_data",
        "mindio_tft_patch.launch.standby",
        "mindio_tft_patch.launch.ttprun",
    }
)
_TORCH_MODULES = frozenset({"torch.distributed.run", "torch.distributed.launch"})
_TORCH_FILES = (("torch", "distributed", "run.py"), ("torch", "distributed", "launch.py"))


class Program(Enum):
    """Kinds of programs."""

    TRAINING = "training"  # or anything else that is no launcher
    TORCHRUN = "torchrun"
    OWN_TOOL = "own tool"  # its command line holds the flags of a job that it starts or looks at


def program_of(argv0: str, modules: Mapping[str, object], original: Sequence[str]) -> Program:
    """The kind of this program.

    Args:
        argv0: sys.argv[0].
        modules: sys.modules; only the main module is looked at: a rank may import torch.distributed.run too.
        original: sys.orig_argv.
    """
    path = PurePath(argv0)
    names = {_main_module(modules), _module_option(argv0, original)}
    if path.stem in _OWN_SCRIPTS or names & _OWN_MODULES:
        return Program.OWN_TOOL
    if path.stem.startswith("torchrun") or path.parts[-3:] in _TORCH_FILES or names & _TORCH_MODULES:
        return Program.TORCHRUN
    return Program.TRAINING


def _main_module(modules: Mapping[str, object]) -> str:
    """Name under which `python -m` runs the main program; empty for a script."""
    return getattr(getattr(modules.get("__main__"), "__spec__", None), "name", None) or ""


def _module_option(argv0: str, original: Sequence[str]) -> str:
    """The module of `python -m`, while Python is still importing it (sys.argv[0] is "-m" then)."""
    if argv0 != "-m" or "-m" not in original:
        return ""
    following = original[original.index("-m") + 1 :]
    return following[0] if following else ""
