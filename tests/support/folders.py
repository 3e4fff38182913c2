"""Save directories as tests look at them."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"


def content(folder: Path) -> dict[str, str]:
    """Digest of every file below a folder, by its path; temporary folders of a dump count as files."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


def tracked(folder: Path) -> int:
    """Step that the tracker names; 0: there is none."""
    path = folder / TRACKER
    return int(path.read_text()) if path.exists() else 0


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[bool]:
    """Mount something at `folder`; False where this process may not.

    options: of `mount`, without the mount point.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(["mount", *options, str(folder)], check=False, capture_output=True).returncode == 0
    except OSError:
        done = False
    try:
        yield done
    finally:
        if done:
            subprocess.run(["umount", "--lazy", str(folder)], check=False, capture_output=True)
