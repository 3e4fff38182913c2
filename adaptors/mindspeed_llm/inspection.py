"""The table of patches in an environment of MindSpeed-LLM, for `mindio-tft patches`."""

from __future__ import annotations

import importlib

from mindio_tft_patch.adaptors.megatron.session import Session
from mindio_tft_patch.adaptors.mindspeed_llm import detection, feature
from mindio_tft_patch.adaptors.mindspeed_llm.patches import table
from mindio_tft_patch.config import Config
from mindio_tft_patch.errors import UnsupportedError
from mindio_tft_patch.patching import Patch


def wanted(config: Config) -> bool:
    """Return whether a job in this environment would be one of MindSpeed-LLM's, under the plugin."""
    return config.mindspeed == "plugin" and detection.beside_megatron()


def inspected(config: Config) -> list[Patch]:
    """Let MindSpeed patch Megatron in this process, which does not train, and return what we would change then.

    Raises:
        UnsupportedError: MindSpeed-LLM cannot be imported here.
    """
    try:
        importlib.import_module(detection.PATCHER)
    except ImportError as problem:
        raise UnsupportedError(
            f"MindSpeed-LLM is installed, but cannot be imported here ({problem}).",
            change="Ask where MindSpeed-LLM trains, or take it off PYTHONPATH to see the table for plain Megatron.",
        ) from problem
    return [*feature.patches(), *table(Session(config), lambda: None)]
