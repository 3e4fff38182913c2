"""Collectives on gloo that can be interrupted.

gloo's own abort does not release a rank that is blocked in a collective. Two facts, measured on torch 2.14, make it
possible from Python:

- `Work.wait(timedelta)` of a *collective* returns with "timed out" and leaves the work pending, so that waiting in
  slices and looking at a flag between them costs nothing: the first slice ends as soon as the work is done.
- `Work.wait(timedelta)` of a *send or receive* closes the connection when it times out, and that of a *reduce-scatter*
  takes no notice of the time. Those are waited for on a helper thread, and the main thread waits for the helper in
  slices.

Only the thread that called `install()` is interrupted; other threads (an asynchronous save, say) wait as ever.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mindio_tft_patch.adaptors.device.stop_flag import StopFlag
from mindio_tft_patch.processor.progress import ProgressBoard

_SLICE_SECONDS = 0.1
_SLICE = timedelta(seconds=_SLICE_SECONDS)


def _untimed_codes() -> frozenset[int]:
    # c10d::OpType has no Python names; the numbers have been stable since torch 1.9 (Work.hpp): send, receive, receive
    # from any rank, and "unknown", which is what gloo calls its reduce-scatter, alone or coalesced.
    return frozenset({12, 13, 14, 100})


class _Waiter:
    """A helper thread that waits for one work at a time."""

    def __init__(self, wait: Callable[..., bool]) -> None:
        self._wait = wait
        self._jobs: queue.SimpleQueue[tuple[Any, threading.Event, list[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Any) -> tuple[threading.Event, list[Any]]:
        """Begin to wait for `work`; the event is set when it ended, the list then holds its result or exception."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tft-p2p-wait", daemon=True)
            self._thread.start()
        done, result = threading.Event(), []  # type: tuple[threading.Event, list[Any]]
        self._jobs.put((work, done, result))
        return done, result

    def leave(self) -> None:
        """End the thread as soon as what it waits for has ended."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, done, result = job
            try:
                result.append(self._wait(work))
            except BaseException as error:
                result.append(error)
            done.set()
            # A work keeps the connections of its communicator open, and with them other ranks waiting.
            del job, work, done, result


class InterruptibleWaits:
    """Makes every `Work.wait` of one thread end with `Interrupted` once the flag is raised.

    Args:
        flag: looked at before and during each wait.
        board: is told when the thread waits for other ranks.
        everywhere: False where works are not all gloo's: then only those inside on_host() are waited for in slices. A
            work of an accelerator would make the host wait for it, and is ended by its device.
    """

    def __init__(self, flag: StopFlag, board: ProgressBoard, *, everywhere: bool = True) -> None:
        self._board = board
        self._looking = everywhere
        self._flag = flag
        self._thread = threading.get_ident()
        self._original: Callable[..., bool] | None = None
        self._waiter: _Waiter | None = None
        self._untimed = _untimed_codes()

    def install(self) -> None:
        """Wrap `torch.distributed.Work.wait`; the calling thread is the one that can be interrupted."""
        if self._original is not None:
            return
        original = dist.Work.wait
        self._original = original
        self._thread = threading.get_ident()
        self._waiter = _Waiter(original)

        def wait(work: Any, *args: Any, **kwargs: Any) -> bool:
            if threading.get_ident() != self._thread or not self._looking:
                return bool(original(work, *args, **kwargs))
            if args or kwargs:
                # The caller wants a time-out of its own: keep its meaning, only refuse to begin when stopping.
                self._flag.check()
                with self._board.in_collective():
                    return bool(original(work, *args, **kwargs))
            return self._wait(work, original)

        dist.Work.wait = wait

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """What this thread waits for inside is gloo's."""
        before, self._looking = self._looking, True
        try:
            yield
        finally:
            self._looking = before

    def uninstall(self) -> None:
        """Put the original back."""
        if self._original is not None:
            dist.Work.wait = self._original
            self._original = None

    def _wait(self, work: Any, original: Callable[..., bool]) -> bool:
        self._flag.check()
        with self._board.in_collective():
            if work._get_op_type() in self._untimed:
                return self._wait_on_helper(work)
            return self._wait_in_slices(work, original)

    def _wait_in_slices(self, work: Any, original: Callable[..., bool]) -> bool:
        while True:
            try:
                return bool(original(work, _SLICE))
            except RuntimeError:
                # A time-out leaves the work incomplete; a real failure completes it with an exception. But the work may
                # also have ended well just after the time-out: asking once more tells the two apart, at once.
                if work.is_completed():
                    return bool(original(work))
            self._flag.check()

    def _wait_on_helper(self, work: Any) -> bool:
        assert self._waiter is not None
        done, result = self._waiter.submit(work)
        while not done.wait(_SLICE_SECONDS):
            if self._flag.stopping:
                # The helper stays blocked until the connection is closed; the next wait gets a new one.
                assert self._original is not None
                self._waiter.leave()
                self._waiter = _Waiter(self._original)
                self._flag.check()
        outcome = result[0]
        if isinstance(outcome, BaseException):
            raise outcome
        return bool(outcome)
