"""The dying-gasp checkpoint by callbacks: every rank that has a part saves it, then one rank renames the result.

save_ckpt runs on a thread of its own. The rank that renames must know that all others have saved; they say so in the
job's store, under a name that carries the number of the attempt.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from mindio_tft_patch.adaptors.sdk.accelerator import Accelerator
from mindio_tft_patch.adaptors.sdk.callbacks import Callback
from mindio_tft_patch.errors import DumpError, Interrupted

log = logging.getLogger("mindio_tft_patch.sdk")

_SLICE_SECONDS = 0.05
_SAVED = "saved"
SOMEWHERE = "the place that the save_ckpt callback has chosen"


class MeetingStore(Protocol):
    """What is needed of the job's store; torch.distributed.Store satisfies it."""

    def set(self, key: str, value: str, /) -> object:
        """Store a value."""
        ...

    def get(self, key: str, /) -> bytes:
        """Return a value that is there."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Are all of them there?"""
        ...


class Meeting:
    """Where the ranks of one attempt at a checkpoint tell each other how far they are.

    Args:
        store: the job's store; opened when first needed.
        attempt: number of the recovery.
    """

    def __init__(self, store: Callable[[], MeetingStore], attempt: int) -> None:
        self._store = store
        self._attempt = attempt

    def tell(self, rank: int, outcome: str = _SAVED) -> None:
        """This rank has saved, or why it has not."""
        self._store().set(self._key(rank), outcome)

    def await_all(self, ranks: Sequence[int], deadline: float, interrupted: Callable[[], bool]) -> None:
        """Wait until every rank has saved.

        Args:
            deadline: monotonic seconds.

        Raises:
            DumpError: one has failed, or did not come in time.
            Interrupted: a newer attempt has begun.
        """
        store = self._store()
        for rank in ranks:
            key = self._key(rank)
            while not store.check([key]):
                if interrupted():
                    raise Interrupted
                if time.monotonic() > deadline:
                    raise DumpError(f"rank {rank} has not saved its part in time", collateral=True)
                time.sleep(_SLICE_SECONDS)
            outcome = store.get(key).decode()
            if outcome != _SAVED:
                raise DumpError(f"rank {rank} has failed to save its part: {outcome}", collateral=True)

    def _key(self, rank: int) -> str:
        return f"sdk/dump/{self._attempt}/{rank}"


class SaveThread:
    """Runs save_ckpt on a thread of its own, one at a time.

    Args:
        accelerator: the save gets its device, and a stream of its own.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._thread: threading.Thread | None = None

    def run(self, save: Callable[[], object], deadline: float, interrupted: Callable[[], bool]) -> None:
        """Save, and wait for the end of it.

        Raises:
            DumpError: it has failed, or did not end in time.
            Interrupted: a newer attempt has begun.
        """
        if self._thread is not None and self._thread.is_alive():
            raise DumpError("save_ckpt of an earlier attempt has not returned")
        failures: list[BaseException] = []

        def body() -> None:
            try:
                self._accelerator.use()
                with self._accelerator.own_stream():
                    save()
            except BaseException as problem:
                failures.append(problem)

        thread = self._thread = threading.Thread(target=body, name="mindio-tft-save", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_SLICE_SECONDS)
            if thread.is_alive() and interrupted():
                raise Interrupted
            if thread.is_alive() and time.monotonic() > deadline:
                raise DumpError("save_ckpt has not returned in time")
        if failures:
            raise DumpError(f"save_ckpt failed: {type(failures[0]).__name__}: {failures[0]}") from failures[0]


def write(
    rank: int,
    step: int,
    *,
    info: list[dict[str, object]],
    savers: Sequence[int],
    meeting: Meeting,
    threads: SaveThread,
    save: Callable[[int, list[dict[str, object]]], object],
    rename: Callable[[int], object] | None,
    deadline: float,
    interrupted: Callable[[], bool],
) -> str:
    """This rank's part in the checkpoint of `step`.

    Args:
        info: what this rank saves; empty: nothing.
        savers: all ranks that save something; the first one renames.
        deadline: monotonic seconds.

    Returns:
        Where the checkpoint is, in words; empty on ranks that do not rename it.

    Raises:
        DumpError: this rank, or one that it has to wait for, has failed.
        Interrupted: a newer attempt has begun.
    """
    alone = list(savers) == [rank]
    try:
        if info:
            threads.run(lambda: save(step, info), deadline, interrupted)
    except DumpError as problem:
        if not alone:
            meeting.tell(rank, str(problem))
        raise
    if rank not in savers:
        return ""
    if not alone:
        meeting.tell(rank)
    if rank != savers[0]:
        return ""
    if not alone:
        meeting.await_all(savers, deadline, interrupted)
    try:
        named = None if rename is None else rename(step)
    except Exception as problem:
        raise DumpError(f"rename failed: {type(problem).__name__}: {problem}") from problem
    log.info("the checkpoint of step %d is complete", step)
    # The documents have the rename callback return nothing; one that returns a path makes the reports more useful.
    return str(named) if isinstance(named, (str, os.PathLike)) else SOMEWHERE


def bound(callback: Callback, args: object, *, mindspore: bool) -> Callable[[int], object]:
    """The rename callback: under MindSpore it gets its context, elsewhere the arguments of the step."""
    return lambda step: callback.function(step, callback.context if mindspore else args)
