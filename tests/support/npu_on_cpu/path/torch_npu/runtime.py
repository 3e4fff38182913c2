"""The device of one process: it can be stopped, hit by a memory error, and restarted.

What torch_npu's documentation and source say of the real one: `stop_device`, called on any thread, ends what the device
does, and whoever waits for it gets a RuntimeError with FORCE STOP until `restart_device`. `check_uce_in_memory` tells
what a memory error has hit, until the restart. Here the device is the main thread's gloo collectives.
"""

from __future__ import annotations

import os

from mindio_tft_patch.adaptors.device.stop_flag import StopFlag
from mindio_tft_patch.adaptors.device.waits import InterruptibleWaits
from mindio_tft_patch.processor.progress import ProgressBoard
from torch_npu.groups import Groups


class _StoppedDevice(StopFlag):
    """What the main thread's waits look at: a stopped device fails everything, whoever has stopped it and why."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped = False

    @property
    def stopping(self) -> bool:
        return self.stopped

    def check(self) -> None:
        if self.stopped:
            raise RuntimeError("FORCE STOP.")


class Runtime:
    """The device.

    Attributes:
        groups: its process groups.
        memory_error: what check_uce_in_memory answers until the restart: 0: nothing, 2: memory of no consequence, 3:
            memory that has to be made anew.
    """

    def __init__(self) -> None:
        self.memory_error = 0
        self._device = _StoppedDevice()
        self._waits = InterruptibleWaits(self._device, ProgressBoard())
        self.groups = Groups()

    def install(self) -> None:
        """On the main thread, once."""
        self._waits.install()
        self.groups.install()

    def stop(self) -> int:
        """End what the main thread waits for; 0: done."""
        self._device.stopped = True
        return 0

    def restart(self) -> None:
        """Make the device usable again."""
        self._device.stopped = False
        self.memory_error = 0


runtime = Runtime()
if os.environ.get("TFT_MINDSPEED") == "sdk":  # elsewhere the plugin's own device stops the main thread
    runtime.install()
