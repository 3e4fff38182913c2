"""What `ttprun` says of a job that ended before any rank had registered, when no rank has said why. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from mindio_tft_patch.adaptors.doctor.plugin_import import find_import
from mindio_tft_patch.adaptors.unknown_words import said_of_misspelt

_NOBODY = "no rank registered with the controller: what the ranks printed above says why"
_ASKS = "does the script begin with `import mindio_tft_patch`?"


def likely_causes(script: str, text: str | None, words: Sequence[str]) -> list[str]:
    """Lines for the end of the report.

    Args:
        script: the training script's name. text: what stands in it; None: it was not read.
        words: those behind its name.
    """
    found = None if text is None else find_import(text)
    misspelt = said_of_misspelt(words)
    if found is None:
        return [_NOBODY, *misspelt] if misspelt else [f"{_NOBODY}; {_ASKS}"]
    if found.absent:
        return [
            f"{_NOBODY}; {script} does not import mindio_tft_patch: unless a module that it imports does, Megatron "
            "does not know the plugin's flags. Make `import mindio_tft_patch` its first import",
            *misspelt,
        ]
    return [_NOBODY, *misspelt]
