"""The little that the SDK needs of a device: which one, a stream of one's own, and giving memory back.

torch is looked up and never imported here: a process that has not imported it has no device to speak of. The callbacks
run on threads of ours, and a new thread starts on device 0.

Never run on hardware by us; see docs/verified.md.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
from contextlib import AbstractContextManager
from typing import Any

log = logging.getLogger("mindio_tft_patch.sdk")


class Accelerator:
    """The device of this process.

    Attributes:
        index: number of the device, as torch had it when the processor was initialised; None: there is none.
    """

    def __init__(self) -> None:
        self.index: int | None = None
        self._stream: Any = None

    def remember(self) -> None:
        """Take note of the current device of the calling thread."""
        module = _module()
        self.index = None if module is None else int(module.current_device())

    def use(self) -> None:
        """Make it the current device of the calling thread."""
        module = _module()
        if module is not None and self.index is not None:
            module.set_device(self.index)

    def own_stream(self) -> AbstractContextManager[Any]:
        """A stream that training does not use, so that a save does not queue behind what training has left."""
        module = _module()
        if module is None or self.index is None:
            return contextlib.nullcontext()
        if self._stream is None:
            kind = getattr(module, "SyncLaunchStream", None) or module.Stream
            self._stream = kind()
        stream: AbstractContextManager[Any] = module.stream(self._stream)
        return stream

    def give_memory_back(self, *, collect: bool = True) -> None:
        """Return the memory that torch keeps to the device.

        Args:
            collect: collect garbage first, which stops all threads of the process meanwhile.
        """
        if collect:
            gc.collect()
        module = _module()
        if module is None or self.index is None:
            return
        try:
            module.empty_cache()
        except RuntimeError as problem:
            # After a fault the device may refuse anything until it is repaired; memory is not worth the recovery.
            log.warning("the device cache was not emptied: %s", problem)


def _module() -> Any:
    """torch.npu or torch.cuda, whichever this process has a device of; None: neither."""
    torch = sys.modules.get("torch")
    for name in ("npu", "cuda"):
        module = getattr(torch, name, None)
        if module is not None and module.is_available():
            return module
    return None
