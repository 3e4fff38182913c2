"""Fault tolerance for Megatron-LM and MindSpeed-LLM training: `import mindio_tft_patch` at the top of pretrain_gpt.py.

What the import does, and all that it does:

- in a training process with --enable-high-availability (or HIGH_AVAILABILITY set): patches Megatron;
- in a training process that asks for --help: adds the flags to Megatron's parser;
- on a machine without accelerator, when the job asks for gloo: lets the CPU stand in for the device;
- in the script of torchrun itself: lengthens torchrun's patience with survivors;
- everywhere: makes the names of the MindIO TFT SDK (`mindio_ttp`) importable where the original is not installed.

When it is imported only because one of those names was, nothing is patched. Otherwise nothing is imported, patched or
started.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mindio_tft_patch import old_names
from mindio_tft_patch.config import Config, process_config
from mindio_tft_patch.errors import ConfigError, PatchError, TftError, UnsupportedError
from mindio_tft_patch.program import Program, program_of

if TYPE_CHECKING:
    from mindio_tft_patch.adaptors.megatron.install import Installation

__version__ = "0.1.0"
__all__ = ["Config", "ConfigError", "PatchError", "TftError", "UnsupportedError", "activate", "installation"]


class _Process:
    """What the plugin has done to this process."""

    installation: Installation | None = None


def installation() -> Installation | None:
    """The patched Megatron of this process; None when nothing was patched."""
    return _Process.installation


def activate(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> None:
    """Do what the import does, for the given arguments; called by the import. A second call does nothing more.

    Args:
        argv: arguments of the training script, without its name; default sys.argv[1:].
        environ: environment; default os.environ.

    Raises:
        ConfigError: flags or variables that cannot work.
        PatchError: a patch target of Megatron has moved.
    """
    argv = sys.argv[1:] if argv is None else argv
    environ = os.environ if environ is None else environ
    program = program_of(sys.argv[0] if sys.argv else "", sys.modules, sys.orig_argv)
    if program is Program.OWN_TOOL:
        return  # what is wrong with the flags of its job is for the tool to say
    if _in_child_of_training():
        return
    config = process_config(environ, argv)
    if program is Program.TORCHRUN:
        _lengthen_patience(config)
        return
    if _cpu_may_stand_in(argv, environ):
        from mindio_tft_patch.adaptors.device import cpu

        if cpu.wanted(argv, environ):
            cpu.install_cpu_stand_in()
    if config.own_handlers:
        return
    if config.high_availability and _Process.installation is None:
        old_names.warn_of_original(environ)
        _Process.installation = _installed(config)
    elif "--help" in argv or "-h" in argv:
        _add_flags_to_help()


def _add_flags_to_help() -> None:
    from mindio_tft_patch.adaptors.megatron_legacy.tree import find_tree

    if find_tree() is not None:
        from mindio_tft_patch.adaptors.megatron_legacy.install import add_flags_to_help
    else:
        from mindio_tft_patch.adaptors.megatron.arguments import add_flags_to_help
    add_flags_to_help()


def _installed(config: Config) -> Installation:
    """Patch Megatron now; where MindSpeed-LLM may want to patch it first, as soon as it has."""
    from mindio_tft_patch.adaptors.megatron_legacy.tree import find_tree

    if find_tree() is not None:
        from mindio_tft_patch.adaptors.megatron_legacy.install import LegacyInstallation

        legacy = LegacyInstallation(config)
        legacy.start()
        return legacy
    from mindio_tft_patch.adaptors.mindspeed_llm.detection import beside_megatron

    if beside_megatron():
        from mindio_tft_patch.adaptors.mindspeed_llm.install import DeferredInstallation

        deferred = DeferredInstallation(config)
        deferred.prepare()
        return deferred
    from mindio_tft_patch.adaptors.megatron.install import Installation

    made = Installation(config)
    made.apply()
    return made


def _in_child_of_training() -> bool:
    """Is this a helper process of a rank (data loader, checkpoint writer), started by importing its script again?

    Such a process trains nothing; patching Megatron in it would cost seconds and protect nobody.
    """
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _cpu_may_stand_in(argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """A cheap look before adaptors (and torch) are imported at all."""
    return environ.get("TFT_DEVICE", "") == "cpu" or any("--distributed-backend" in word for word in argv)


def _lengthen_patience(config: Config) -> None:
    from mindio_tft_patch.launch.patience import lengthen_patience

    lengthen_patience(config)


def _imported() -> None:
    """What the import does."""
    old_names.install()
    if not old_names.imported_by_old_name():
        activate()
    elif program_of(sys.argv[0] if sys.argv else "", sys.modules, sys.orig_argv) is Program.TORCHRUN:
        _lengthen_patience(process_config(os.environ, []))


_imported()
