"""Words of a command that nobody knows: what was meant by them? Pure; for the launcher, its ranks and the doctor."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from mindio_tft_patch.config import FEATURE_FLAGS, MASTER_FLAG, Config
from mindio_tft_patch.errors import ConfigError

STANDBY = "--standby"
_FLAGS = (MASTER_FLAG, *FEATURE_FLAGS)
_LIKE_A_FLAG = 0.85  # of difflib: one or two letters of such long words


def meant_flag(word: str) -> str:
    """The flag of ours that a misspelt word stands for; empty: it is one of them, or like none."""
    name = word.partition("=")[0]
    near = difflib.get_close_matches(name, _FLAGS, n=1, cutoff=_LIKE_A_FLAG)
    return near[0] if near and name not in _FLAGS else ""


def misspelt(words: Sequence[str]) -> dict[str, str]:
    """Words that are like a flag of ours and are none, with the flag that was meant."""
    found = {word.partition("=")[0]: meant_flag(word) for word in words if word.startswith("-")}
    return {word: flag for word, flag in found.items() if flag}


def switches_nothing(word: str) -> str:
    """What is wrong with a misspelt flag; the end of the sentence is the caller's."""
    return f"{word} is not a flag, so nothing is switched on by it"


def said_of_misspelt(words: Sequence[str]) -> list[str]:
    """What to tell of misspelt flags, a line each."""
    return [f"{switches_nothing(word)}: write {flag}." for word, flag in misspelt(words).items()]


def misplaced(script_words: Sequence[str], config: Config) -> ConfigError | None:
    """What is wrong with --standby behind the script's name; None: nothing, or it may be the script's own.

    Args:
        script_words: the words behind the script's name.
    """
    if not config.high_availability or config.own_handlers:
        return None
    if not any(word.partition("=")[0] == STANDBY for word in script_words):
        return None
    return ConfigError(
        f"{STANDBY} stands behind the script's name, and is an option of ttprun.",
        change="Put it before the script's name. A training script with handlers of its own (TFT_ADAPTOR=own) may have "
        "such an option itself.",
    )
