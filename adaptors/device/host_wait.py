"""Guesses, on accelerators, whether a rank's main thread waits for other ranks.

Over gloo every wait passes through our own code (waits.py). On an accelerator a rank waits for others inside a
synchronisation with the device, which Python does not see. What Python does see, from the control thread, is that the
main thread has executed no bytecode since the last look, and where it stands. A thread that stands still is taken to
wait for the device, and so for others, unless it stands in a data loader, a queue or a sleep: those are the culprits of
a hang. A rank whose own kernel is stuck is not told apart; then nobody is blamed, and everybody who answers saves.

Never run on hardware by us; see docs/verified.md.
"""

from __future__ import annotations

import sys
from types import FrameType

_LOOK_AT_FRAMES = 15
# Path fragments and function names of waits that are not for other ranks.
_LOCAL_FILES = ("torch/utils/data/", "/queue.py", "/selectors.py", "/subprocess.py", "multiprocessing/", "/socket.py")
_LOCAL_FUNCTIONS = frozenset({"sleep", "fetch_batch", "get_batch"})


class HostWait:
    """Looks at one thread again and again.

    Args:
        thread: identifier of the main thread (threading.get_ident()).
    """

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._place: tuple[int, int] | None = None

    def __call__(self) -> bool:
        """True when the thread has stood still since the last call, and not in work of its own."""
        frame = sys._current_frames().get(self._thread)
        if frame is None:
            self._place = None
            return False
        place = (id(frame), frame.f_lasti)
        still, self._place = place == self._place, place
        return still and not _works_locally(frame)


def _works_locally(frame: FrameType) -> bool:
    current: FrameType | None = frame
    for _ in range(_LOOK_AT_FRAMES):
        if current is None:
            return False
        code = current.f_code
        file = code.co_filename.replace("\\", "/")
        if code.co_name in _LOCAL_FUNCTIONS or any(part in file for part in _LOCAL_FILES):
            return True
        current = current.f_back
    return False
