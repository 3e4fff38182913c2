"""What the training thread is doing, as far as the SDK's calls tell."""

from __future__ import annotations

import msgspec

from mindio_tft_patch.processor.progress import ProgressBoard
from mindio_tft_patch.protocol.messages import Progress
from mindio_tft_patch.protocol.phases import Activity

# Not told apart by any call of the SDK from evaluating or saving, which may take long.
_MAY_BE_LONG = frozenset({Activity.COMPUTE, Activity.BETWEEN})


class SdkBoard(ProgressBoard):
    """A board for a framework that does not say when it evaluates or saves.

    Its heartbeats then call everything between two updates long work, so that a long save of one rank is not taken for
    a hang, and that rank killed. A rank that gives no sign of life is found all the same.
    """

    def snapshot(self) -> Progress:
        """The state as reported in a heartbeat."""
        progress = super().snapshot()
        if progress.activity in _MAY_BE_LONG:
            return msgspec.structs.replace(progress, activity=Activity.EVALUATE)
        return progress
