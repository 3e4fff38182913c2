"""Puts the plugin into a process that may be one of MindSpeed-LLM's, or lets MindSpeed-LLM's own feature do the work.

The switch is TFT_MINDSPEED:

    plugin  (default) our adaptor protects training, MindSpeed-LLM's own feature stays out
    sdk     its own feature protects training, as a client of the SDK's names; we patch nothing
"""

from __future__ import annotations

import logging

from mindio_tft_patch.adaptors.megatron.install import Installation
from mindio_tft_patch.adaptors.mindspeed_llm import detection, feature
from mindio_tft_patch.adaptors.mindspeed_llm.patches import table
from mindio_tft_patch.errors import UnsupportedError

log = logging.getLogger("mindio_tft_patch.install")


class DeferredInstallation(Installation):
    """Patches Megatron when MindSpeed's patcher has ended, or when it is clear that there will be none."""

    def prepare(self) -> None:
        """Wait for the one or the other.

        Raises:
            UnsupportedError: MindSpeed-LLM's own feature is in place already.
        """
        if self.config.mindspeed == "sdk":
            detection.when_ready(patched=_leave_it_to_mindspeed, plain=self.apply)
            return
        if detection.patched_already():
            raise UnsupportedError(
                "MindSpeed-LLM has patched Megatron before mindio_tft_patch was imported, its own high-availability "
                "feature included.",
                change="Put `import mindio_tft_patch` in front of `from mindspeed_llm import megatron_adaptor`.",
            )
        detection.before_patching(feature.MODULE, lambda _module: self._take_the_place())
        detection.when_ready(patched=self._apply_after_mindspeed, plain=self.apply)

    def _take_the_place(self) -> None:
        # No version of theirs can be asked for: what the patches rely on is checked of each.
        self.manager.apply(feature.patches(), "")

    def _apply_after_mindspeed(self) -> None:
        self.apply(table)


def _leave_it_to_mindspeed() -> None:
    log.info("TFT_MINDSPEED=sdk: MindSpeed-LLM's own feature protects this job; nothing is patched")
