"""Data iterators that can be put back to the last completed step (adaptation point 11).

A survivor keeps its iterators: it remembers for which step each micro-batch was taken, and hands out again those of
steps behind the one that training goes back to. A process that has come back has built its own loaders, before it could
know how many samples were used: their samplers are told, and iterated anew. The same is done when a checkpoint is
loaded in place, and for an evaluation that is repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from mindio_tft_patch.adaptors.porting.rewindable import Rewindable

log = logging.getLogger("mindio_tft_patch.rollback")


@dataclass
class _Loader:
    """A loader that Megatron has built, and how it iterates over it."""

    loader: Any
    cyclic: bool
    whole: bool = False  # every evaluation goes over the whole set, from its beginning

    def from_sample(self, consumed: int) -> Iterator[Any]:
        """A new iterator that begins behind `consumed` samples."""
        self.loader.batch_sampler.consumed_samples = 0 if self.whole else consumed
        if not self.cyclic:
            return iter(self.loader)
        # Beginning to iterate draws from torch's generator. In the middle of the data that was done long ago, and must
        # not happen within the next step; at its beginning the first step does it.
        return self._endless(iter(self.loader) if consumed and not self.whole else ())

    def _endless(self, begun: Iterable[Any]) -> Iterator[Any]:
        yield from begun
        while True:
            yield from self.loader


class DataSource:
    """The data iterators of one rank.

    Attributes:
        train: one for each model chunk that reads data.
    """

    def __init__(self) -> None:
        self.train: list[Rewindable] = []
        self._valid: list[Any] = []
        self._built: list[Any] = []
        self._train_loaders: list[_Loader | None] = []
        self._valid_loaders: list[_Loader | None] = []

    # What Megatron builds (wrappers).

    def around_build_loader(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wrapper of build_pretraining_data_loader(dataset, consumed_samples)."""
        loader = wrapped(*args, **kwargs)
        self._built.append(loader)
        return loader

    def around_build_iterators(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wrapper of build_train_valid_test_data_iterators: loaders are built for training, validation, test."""
        from megatron.training import get_args

        self._built = []
        result = wrapped(*args, **kwargs)
        cyclic = get_args().dataloader_type == "cyclic"
        full = bool(getattr(get_args(), "full_validation", False))
        train = self._built[0] if self._built else None
        valid = self._built[1] if len(self._built) == 3 else None  # several validation sets are not told apart
        self._train_loaders.append(_known(train, cyclic))
        self._valid_loaders.append(_known(valid, cyclic or full, whole=full))
        return result

    def attach(self, train: Any, valid: Any, step: int) -> None:
        """train() begins after `step` with these iterators: one each, or one for each model chunk.

        None where no data is read.
        """
        if not self.train:
            # Megatron checks for its own class, so ours goes inside it.
            self.train = [_inside(one, step) for one in _listed(train) if one is not None]
            self._valid = [one for one in _listed(valid) if one is not None]

    @property
    def can_place_training(self) -> bool:
        """The training data can be read again from a given sample on; so too where this rank reads none."""
        return not self.train or len([one for one in self._train_loaders if one is not None]) == len(self.train)

    @property
    def can_place_validation(self) -> bool:
        """The validation data can be read again from a given sample on."""
        return len([one for one in self._valid_loaders if one is not None]) == len(self._valid)

    # Positions.

    def advance(self, step: int) -> None:
        """A step is complete."""
        for one in self.train:
            one.advance(step)

    def rewind_to(self, step: int) -> None:
        """Back to a completed step, on a rank that has trained up to it.

        A rank whose update of that step has failed, and that has taken over the result of another, had read its data,
        and that of iterations that are left out. A rank that alone has completed the step behind it reads that again.

        Raises:
            RecoveryError: what follows that step is not at hand.
        """
        for one in self.train:
            if step > one.completed:
                one.advance(step)
            one.rewind(step)

    def train_from(self, consumed: int, step: int) -> bool:
        """Go on after `step`, behind `consumed` samples.

        Returns:
            False when a loader is not Megatron's own and cannot be positioned.
        """
        return _position(self.train, self._train_loaders, consumed, lambda one, inner: one.replace(inner, step))

    def valid_from(self, consumed: int) -> bool:
        """The same for validation."""
        return _position(self._valid, self._valid_loaders, consumed, lambda one, inner: setattr(one, "iterable", inner))


def _listed(iterators: Any) -> list[Any]:
    return list(iterators) if isinstance(iterators, (list, tuple)) else [iterators]


def _inside(iterator: Any, step: int) -> Rewindable:
    made = Rewindable(iterator.iterable, step)
    iterator.iterable = made
    return made


def _known(loader: Any, cyclic: bool, *, whole: bool = False) -> _Loader | None:
    sampler = getattr(loader, "batch_sampler", None)
    return _Loader(loader, cyclic, whole) if hasattr(sampler, "consumed_samples") else None


def _position(
    iterators: list[Any],
    loaders: list[_Loader | None],
    consumed: int,
    put: Callable[[Any, Iterator[Any]], None],
) -> bool:
    known = [loader for loader in loaders if loader is not None]
    if len(known) != len(iterators):
        return not iterators
    for iterator, loader in zip(iterators, known, strict=True):
        put(iterator, loader.from_sample(consumed))
    return True
