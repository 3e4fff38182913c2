"""A folder in memory for what the processes of a rank leave to their successors; it ends with the launcher.

A launcher that is killed cannot remove its folder. It holds a lock on a file in it, which the kernel takes away with
the process: whoever starts next removes the folders of which nobody holds the lock. A process id in the name would not
do, because containers that share /dev/shm count their processes each for themselves.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

VARIABLE = "TFT_RUN_FOLDER"
_IN_MEMORY = Path("/dev/shm")
_PREFIX = "mindio-tft-"
_LOCK = "launcher.lock"


@contextmanager
def run_folder(place: Path | None = None) -> Iterator[None]:
    """Make the folder and name it in the environment that ranks inherit.

    Args:
        place: where to make it; None: in memory if possible.
    """
    if place is None:
        place = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    remove_left_overs(place)
    folder = tempfile.mkdtemp(prefix=_PREFIX, dir=place)
    lock = _lock(Path(folder))
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = folder
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def remove_left_overs(place: Path) -> list[Path]:
    """Remove folders of launchers of this user that are gone; never raises.

    A folder without the file is left alone: its launcher may be about to write it.
    """
    removed = []
    for folder in place.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            lock = _held(folder / _LOCK)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
                removed.append(folder)
    return removed


def _lock(folder: Path) -> int | None:
    """Hold the lock of one's own folder. It gets its name when it is held: until then nobody else looks at it."""
    descriptor = _held(folder / f"{_LOCK}.new", os.O_CREAT | os.O_EXCL)
    if descriptor is not None:
        os.rename(folder / f"{_LOCK}.new", folder / _LOCK)
    return descriptor


def _held(path: Path, flags: int = 0) -> int | None:
    """A descriptor that holds the lock; None when another process holds it, or there is none to hold."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
