"""Follows a file that another process writes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


class Tail:
    """Complete lines that are appended to a file, which may come into being later.

    Args:
        path: of the file; read from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._rest = b""

    def lines(self) -> Iterator[str]:
        """Lines that have been completed since the last call, without their ends."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as stream:
            stream.seek(self._position)
            content = self._rest + stream.read()
            self._position = stream.tell()
            *complete, self._rest = content.split(b"\n")
            for line in complete:
                yield line.decode(errors="replace").rstrip("\r")
