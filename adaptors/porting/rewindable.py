"""A data iterator that can hand out again what the interrupted step had read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any


class Rewindable:
    """An iterator that can hand out again what was taken since the last `advance`."""

    def __init__(self, inner: Iterator[Any]) -> None:
        self._inner = inner
        self._taken: list[Any] = []
        self._again: deque[Any] = deque()

    def __iter__(self) -> Rewindable:
        return self

    def __next__(self) -> Any:
        value = self._again.popleft() if self._again else next(self._inner)
        # What the training step does to the dictionary must not be seen the second time.
        self._taken.append(dict(value) if isinstance(value, dict) else value)
        return value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def advance(self) -> None:
        """A step is complete: what was taken is used up."""
        self._taken.clear()

    def rewind(self) -> None:
        """Hand out again what was taken since the last advance()."""
        self._again.extendleft(reversed(self._taken))
        self._taken.clear()

    def replace(self, inner: Iterator[Any]) -> None:
        """Go on with another iterator."""
        self._inner = inner
        self._taken.clear()
        self._again.clear()
