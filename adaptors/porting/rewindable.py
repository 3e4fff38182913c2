"""A data iterator that goes back, or on, to any step that a recovery can choose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindio_tft_patch.errors import RecoveryError


class Rewindable:
    """An iterator that knows for which step each of its values was taken, and can hand out again those of later steps.

    What is taken after step S is complete is taken for S+1. A recovery may come to a step that this rank has not
    completed itself, because its update failed and it is filled by another rank: what it had taken for that step is
    used up. Or it may come to the step before the one that this rank alone had completed. Therefore the values of the
    last completed step are kept as well, one step longer than a rank without faults needs them.

    Args:
        inner: hands out what follows the samples of `step`.
        step: last completed step.
    """

    def __init__(self, inner: Iterator[Any], step: int = 0) -> None:
        self._inner = inner
        self._kept: list[tuple[int, Any]] = []  # the step that it was taken for, and the value
        self._place = 0  # of the next value in `_kept`; behind its end the inner iterator is asked
        self._completed = step
        self._oldest = step  # all that was taken after this step is kept
        self._positioned = False

    def __iter__(self) -> Rewindable:
        return self

    def __next__(self) -> Any:
        if self._place == len(self._kept):
            self._kept.append((0, next(self._inner)))
        value = self._kept[self._place][1]
        # The step may have another number than when it was tried first: Megatron can leave iterations out.
        self._kept[self._place] = (self._completed + 1, value)
        self._place += 1
        self._positioned = True
        # What the training step does to the dictionary must not be seen the second time.
        return dict(value) if isinstance(value, dict) else value

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # while an instance is made without __init__, by copy say
            raise AttributeError(name)
        return getattr(self._inner, name)

    @property
    def completed(self) -> int:
        """Last completed step."""
        return self._completed

    def advance(self, step: int) -> None:
        """A step is complete: what was taken since the last one belongs to it.

        Raises:
            ValueError: steps were counted further already.
        """
        if step < self._completed:
            raise ValueError(f"advance({step}) after step {self._completed}: call rewind() or replace() to go back")
        if step > self._completed:
            self._oldest, self._completed = self._completed, step
            self._positioned = True
            used_up = sum(1 for taken_for, _ in self._kept[: self._place] if taken_for <= self._oldest)
            del self._kept[:used_up]
            self._place -= used_up
            # What was handed out by the first try of this step, and not by the second, is for the next one.
            self._kept[self._place :] = [(step + 1, value) for _, value in self._kept[self._place :]]

    def rewind(self, step: int) -> None:
        """Go on behind a step: what was taken for it and before is used up, what was taken after it comes again.

        Args:
            step: target of a recovery.

        Raises:
            RecoveryError: what follows that step is not at hand; a new iterator has to be positioned (`replace`).
        """
        # Behind the step that was begun nothing is known, and a new process has not even begun one.
        newest = self._completed + (1 if self._positioned else 0)
        if not self._oldest <= step <= newest:
            raise RecoveryError(
                "rollback",
                f"the data cannot go on behind step {step}: this iterator knows what follows steps {self._oldest} to "
                f"{newest}. A process that has come back, and one that loads a checkpoint, has to position a new "
                "iterator: Rewindable.replace(iterator, step)",
            )
        self._place = sum(1 for taken_for, _ in self._kept if taken_for <= step)
        self._completed = step

    def replace(self, inner: Iterator[Any], step: int) -> None:
        """Go on behind a step, with another iterator that was positioned there."""
        self._inner, self._kept, self._place = inner, [], 0
        self._completed = self._oldest = step
        self._positioned = True
