"""Data iterators of the Megatron-LM of 2023, whose place can be changed while the training loop holds them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class DataIterator:
    """What train() and evaluate() read from.

    Attributes:
        iterable: where the next micro-batch comes from; may be replaced at any time.
    """

    def __init__(self, iterable: Iterator[Any]) -> None:
        self.iterable = iterable

    def __iter__(self) -> DataIterator:
        return self

    def __next__(self) -> Any:
        return next(self.iterable)


def replaceable(iterators: Any) -> Any:
    """Wrap (train, valid, test), of which each may be None."""
    return tuple(None if one is None else DataIterator(one) for one in iterators)
