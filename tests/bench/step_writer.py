"""A rank writes down when its steps begin and end. Used by every contender, also in foreign environments: no imports.

Everything goes below TFT_BENCH_FOLDER:

    pid-<rank>           process that has this rank, or had it first
    steps-<pid>.txt      "<rank> <step> <world> <began> <ended>", one completed step a line, in monotonic seconds
    held-<pid>           this process has come to the step before which all wait ...
    go                   ... for this file
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

FOLDER, HOLD_BEFORE = "TFT_BENCH_FOLDER", "TFT_BENCH_HOLD_BEFORE"
_POLL_SECONDS = 0.002


class StepWriter:
    """One process of a job.

    Args:
        environ: with the variables of this file.
        rank: at first.
    """

    def __init__(self, environ: Mapping[str, str], rank: int) -> None:
        self._folder = Path(environ[FOLDER])
        self._hold_before = int(environ[HOLD_BEFORE])
        self._file = os.open(self._folder / f"steps-{os.getpid()}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        (self._folder / f"pid-{rank}").write_text(str(os.getpid()))

    def begin(self, step: int) -> float:
        """A step is about to begin; its beginning, in monotonic seconds."""
        if step == self._hold_before and not (self._folder / "go").exists():
            (self._folder / f"held-{os.getpid()}").touch()
            while not (self._folder / "go").exists():
                time.sleep(_POLL_SECONDS)
        return time.monotonic()

    def end(self, step: int, began: float, *, rank: int, world: int) -> None:
        """The step is complete on this rank; `world` ranks took part in it."""
        os.write(self._file, f"{rank} {step} {world} {began:.6f} {time.monotonic():.6f}\n".encode())
