"""Keeps MindSpeed-LLM's own high-availability feature out of the way.

Its feature class wraps communication, optimizer and initialisation, and insists on an installed SDK; its training loop
and scripts look at the flags in Megatron's arguments and then call into that code. Both ends are closed: the methods of
the class do nothing, and the arguments say that the flags are off. Our own configuration comes from the command line.

What the class does without the flags (it wraps torch's collectives, to look at the flags in each) is left out as well.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from mindio_tft_patch.patching import Patch

MODULE = "mindspeed_llm.features_manager.high_availability.high_availability"
_CLASS = f"{MODULE}:HighAvailabilityFeature"

# Method: its parameters, and what would happen. register_args stays: MindSpeed-LLM's parsers must know the flags.
_METHODS = {
    "pre_register_patches": (("patch_manager", "args"), "its wrappers around torch's collectives"),
    "register_patches": (("patch_manager", "args"), "its replicas, groups and wrappers of the optimizer"),
    "pre_validate_args": (("args",), "HIGH_AVAILABILITY switches its own code on"),
    "validate_args": (("args",), "it refuses to start without the SDK of the original system"),
}
_SWITCHES = (
    "enable_high_availability",
    "enable_hbmfault_repair",
    "enable_worker_reboot",
    "distributed_optimizer_no_replica",
    "enable_elastic_training",
)


def patches() -> list[Patch]:
    """What takes MindSpeed-LLM's own feature out; to be applied before its patcher uses it."""
    return [
        Patch(1, f"{_CLASS}.{name}", _nothing, f"MindSpeed-LLM's own feature stays out: {what}", parameters)
        for name, (parameters, what) in _METHODS.items()
    ]


def hide_switches(arguments: Namespace) -> None:
    """Let Megatron's arguments say that the feature is off, so that MindSpeed-LLM's own code does not run."""
    for name in _SWITCHES:
        setattr(arguments, name, False)


def _nothing(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    return None
