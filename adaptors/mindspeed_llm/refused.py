"""Options of MindSpeed and MindSpeed-LLM that cannot work together with ours, each with the reason."""

from __future__ import annotations

from argparse import Namespace

from mindio_tft_patch.config import MASTER_FLAG
from mindio_tft_patch.errors import ConfigError

# Attribute of the arguments: (value that is refused, option, why). True: any value that is not empty.
REFUSED: dict[str, tuple[object, str, str]] = {
    "reuse_fp32_param": (
        True,
        "--reuse-fp32-param",
        "the optimizer's main parameters and the model's share memory, so that one cannot be made from the other",
    ),
    "swap_attention": (True, "--swap-attention", "what was swapped out cannot be brought back after a fault"),
    "virtual_optimizer": (True, "--virtual-optimizer", "swapped-out optimizer state cannot be read after a fault"),
    "schedules_method": (
        "dualpipev",
        "--schedules-method dualpipev",
        "it has a training step of its own, which cannot be entered again after a fault",
    ),
    "layerzero": (True, "--layerzero", "fully sharded parameters have no second holder"),
    "auto_settings": (True, "--auto-settings", "it starts trainings of its own"),
}


def check(arguments: Namespace) -> None:
    """Refuse before training what cannot work.

    Raises:
        ConfigError: what is wrong and what to change, a line for each.
    """
    lines = [
        f"\n  - {option} does not go with {MASTER_FLAG}: {why}. Remove {option}, or set TFT_MINDSPEED=sdk."
        for name, (value, option, why) in REFUSED.items()
        if _is(getattr(arguments, name, None), value)
    ]
    if lines:
        raise ConfigError(f"{MASTER_FLAG}: training cannot start.{''.join(lines)}")


def _is(found: object, refused: object) -> bool:
    return bool(found) if refused is True else found == refused
