"""Adds the feature flags to Megatron's parser, whatever script calls it.

Both generations parse in `megatron.training.arguments.parse_args`: core_v0.12 from initialize_megatron, 0.17 and later
from the script through `parse_and_validate_args`. Both then call `validate_args` (or `validate_yaml`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NoReturn

from mindio_tft_patch.adaptors.megatron import versions
from mindio_tft_patch.adaptors.refusal import tell_launcher
from mindio_tft_patch.adaptors.unknown_words import said_of_misspelt
from mindio_tft_patch.config import ELASTIC_FLAG, HBM_FLAG, MASTER_FLAG, NO_REPLICA_FLAG, REBOOT_FLAG, Config
from mindio_tft_patch.patching import Patch, PatchManager

HELP = {
    MASTER_FLAG: "Survive faults: keep a second copy of the optimizer state, and write a checkpoint of the last "
    "completed step when a process is lost.",
    HBM_FLAG: "Repair memory and network faults in place.",
    REBOOT_FLAG: "Restart a lost process alone, while the others wait.",
    NO_REPLICA_FLAG: "Keep no second copy of the optimizer state; reload the last periodic checkpoint instead.",
    ELASTIC_FLAG: "Go on with fewer ranks.",
}

ArgumentsProvider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


def patches(config: Config) -> list[Patch]:
    """Patches that add the flags."""

    def parse_args(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        theirs, rest = _provider(args, kwargs)
        parsed = wrapped(_telling(with_flags(theirs)), *rest, **kwargs)
        set_switches(parsed, config)
        return parsed

    return [
        Patch(
            point=1,
            target="megatron.training.arguments:parse_args",
            wrapper=parse_args,
            why="adds the flags to Megatron's parser",
            parameters=("extra_args_provider", "ignore_unknown_args"),
            mandatory=False,  # a script may hand Megatron arguments that it parsed itself
        )
    ]


def add_flags_to_help() -> None:
    """Add the flags to the parser of a process that only asks for help; nothing else is patched."""
    PatchManager().apply(patches(Config()), versions.find_megatron().core)


def with_flags(theirs: ArgumentsProvider | None) -> ArgumentsProvider:
    """Chain the script's own provider, which goes first, and our flags."""

    def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        if theirs is not None:
            parser = theirs(parser)
        group = parser.add_argument_group(title="fault tolerance (mindio_tft_patch)")
        for flag, text in HELP.items():
            # The script, or another patcher (MindSpeed-LLM has the same names), may have added it.
            try:
                group.add_argument(flag, action="store_true", help=text)
            except argparse.ArgumentError:
                continue
        return parser

    return provider


def _telling(provider: ArgumentsProvider) -> ArgumentsProvider:
    """What the parser refuses becomes the last that the launcher says; Megatron's usage has thousands of lines."""

    def telling(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = provider(parser)
        theirs = parser.error

        def error(message: str) -> NoReturn:
            words = [word for word in message.split() if word.startswith("-")]
            tell_launcher("\n".join([f"Megatron refuses the arguments: {message}", *said_of_misspelt(words)]))
            theirs(message)

        vars(parser)["error"] = error
        return parser

    return telling


def set_switches(arguments: argparse.Namespace, config: Config) -> None:
    """Make the arguments say what is on: a switch may come from HIGH_AVAILABILITY, not the command line."""
    arguments.enable_high_availability = config.high_availability
    arguments.enable_hbmfault_repair = config.hbmfault_repair
    arguments.enable_worker_reboot = config.worker_reboot
    arguments.distributed_optimizer_no_replica = config.no_replica
    arguments.enable_elastic_training = config.elastic_training


def _provider(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ArgumentsProvider | None, tuple[Any, ...]]:
    if args:
        return args[0], args[1:]
    return kwargs.pop("extra_args_provider", None), ()
