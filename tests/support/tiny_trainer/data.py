"""Endless text of which every sample can be made from its number: a stand-in for a data set and its loader."""

from __future__ import annotations

from argparse import Namespace

import torch


class Batches:
    """Iterator over the micro-batches of one data-parallel rank.

    Attributes:
        consumed: samples that all ranks together have read; setting it positions the iterator.
    """

    def __init__(self, options: Namespace, rank: int, size: int) -> None:
        self._options = options
        self._rank = rank
        self._size = size
        self.consumed = 0

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> torch.Tensor:
        """The next micro-batch: [micro_batch, sequence + 1] int64."""
        count = self._options.micro_batch
        first = self.consumed + self._rank * count
        self.consumed += self._size * count
        return torch.stack([self._sample(number) for number in range(first, first + count)]).cuda()

    def _sample(self, number: int) -> torch.Tensor:
        places = torch.arange(self._options.sequence + 1)
        return (number * 7 + places * (number % 5 + 1) + (places // 3) * (number % 11)) % self._options.vocabulary
