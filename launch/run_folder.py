"""A folder in memory for what the processes of a rank leave to their successors; it ends with the launcher."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "TFT_RUN_FOLDER"
_IN_MEMORY = Path("/dev/shm")


@contextmanager
def run_folder() -> Iterator[None]:
    """Make the folder and name it in the environment that ranks inherit."""
    place = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None
    folder = tempfile.mkdtemp(prefix="mindio-tft-", dir=place)
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = folder
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
