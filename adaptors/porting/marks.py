"""How far a rank has come in the work around each step: begun, logged, evaluated, saved.

Needed after a fault, to repeat what was cut off and not to repeat what was finished. A few bytes, written to a small
file in memory as well (a "black box"): the process that takes the place of a lost one reads what its predecessor had
done.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
from pathlib import Path

log = logging.getLogger("mindio_tft_patch.session")

_FORM = struct.Struct("<4q")
_NAMES = ("begun", "logged", "evaluated", "saved")


class Marks:
    """Steps by kind of work; each the last one that was begun or finished.

    Attributes:
        begun: train_step was entered for this step.
        logged: training_log has returned; what it prints is printed.
        evaluated: the evaluation after this step has returned.
        saved: the save after this step has returned.
    """

    begun: int
    logged: int
    evaluated: int
    saved: int

    def __init__(self) -> None:
        for name in _NAMES:
            self.__dict__[name] = 0
        self._memory: mmap.mmap | None = None

    def open(self, folder: str | os.PathLike[str] | None, rank: int, *, returning: bool) -> None:
        """Keep the marks in a file of `folder` too.

        Args:
            folder: `Protection.run_folder`; None: there is none, and the marks are kept in this process only.
            returning: this process takes the place of a lost one: begin with what that one had done.
        """
        if folder is None:
            return
        path = Path(folder) / f"marks-{rank}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            os.ftruncate(descriptor, _FORM.size)
            self._memory = mmap.mmap(descriptor, _FORM.size)
            os.close(descriptor)
        except OSError as error:
            log.warning("marks cannot be kept in %s (%s); after a fault a log line may be written twice", path, error)
            return
        if returning:
            self.__dict__.update(zip(_NAMES, _FORM.unpack(self._memory[:]), strict=True))
        else:  # an earlier attempt of the whole job has used the file
            self.begun = 0

    def __setattr__(self, name: str, value: object) -> None:
        self.__dict__[name] = value
        if name in _NAMES and self._memory is not None:
            self._memory[:] = _FORM.pack(*(self.__dict__[one] for one in _NAMES))

    def values(self) -> dict[str, int]:
        """All marks."""
        return {name: self.__dict__[name] for name in _NAMES}
