"""Puts the plugin into a process of the Megatron-LM of 2023."""

from __future__ import annotations

from mindio_tft_patch.adaptors.megatron.install import Installation
from mindio_tft_patch.adaptors.megatron_legacy import newer_names
from mindio_tft_patch.adaptors.megatron_legacy.patches import flag_patches, table
from mindio_tft_patch.adaptors.megatron_legacy.session import LegacySession
from mindio_tft_patch.adaptors.megatron_legacy.tree import VERSION
from mindio_tft_patch.config import Config
from mindio_tft_patch.patching import PatchManager


class LegacyInstallation(Installation):
    """A patched Megatron of 2023. One per process."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.session = LegacySession(config)

    def start(self) -> None:
        """Patch Megatron.

        Raises:
            PatchError: a function that we wrap is not as in the commit that we know.
            ConfigError: TFT_INJECT makes no sense.
        """
        newer_names.install()
        self.apply(table)


def add_flags_to_help() -> None:
    """Add the flags to the parser of a process that only asks for help; nothing else is patched."""
    PatchManager().apply(flag_patches(Config()), VERSION)
