"""The checkpoint by callbacks: on which thread, in which order, and what a failure does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.sdk_job import MemoryStore

from mindio_tft_patch.adaptors.sdk import dump
from mindio_tft_patch.adaptors.sdk.accelerator import Accelerator
from mindio_tft_patch.adaptors.sdk.callbacks import Callback
from mindio_tft_patch.errors import DumpError, Interrupted

FAR = float("inf")
INFO: list[dict[str, object]] = [{"type": 0, "ranks": [0, 1]}]


def never() -> bool:
    return False


class Job:
    """Ranks that write in turn, in one thread."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.done: list[object] = []
        self.threads: set[str] = set()

    def writes(
        self,
        rank: int,
        *,
        info: list[dict[str, object]] = INFO,
        savers: tuple[int, ...] = (0, 1),
        attempt: int = 1,
        save: Callable[..., object] | None = None,
        rename: Callable[[int], object] | None = None,
        deadline: float = FAR,
        interrupted: Callable[[], bool] = never,
    ) -> str:
        def note(step: int, info: list[dict[str, object]]) -> None:
            self.done.append(("save", rank, step))
            self.threads.add(threading.current_thread().name)

        return dump.write(
            rank,
            7,
            info=info,
            savers=savers,
            meeting=dump.Meeting(lambda: self.store, attempt),
            threads=dump.SaveThread(Accelerator()),
            save=save or note,
            rename=rename or (lambda step: self.done.append(("rename", rank, step))),
            deadline=deadline,
            interrupted=interrupted,
        )


def test_the_first_saver_renames_when_the_others_have_saved() -> None:
    job = Job()
    job.writes(1)
    job.writes(0)
    assert job.done == [("save", 1, 7), ("save", 0, 7), ("rename", 0, 7)]
    assert job.threads == {"mindio-tft-save"}


def test_where_the_checkpoint_is_says_who_renames_it() -> None:
    job = Job()
    assert job.writes(1) == ""
    assert job.writes(0) == "the place that the save_ckpt callback has chosen"
    assert job.writes(0, savers=(0,), rename=lambda step: Path("/save/iter_7")) == "/save/iter_7"


def test_a_rank_that_speaks_for_nothing_does_nothing() -> None:
    job = Job()
    job.writes(3, info=[])
    assert (job.done, job.store.values) == ([], {})


def test_who_saves_alone_needs_no_store() -> None:
    job = Job()
    job.store = None  # type: ignore[assignment]
    job.writes(2, savers=(2,))
    assert job.done == [("save", 2, 7), ("rename", 2, 7)]


def fails(*ignored: Any) -> None:
    raise OSError("disk full")


def test_nobody_renames_when_one_has_failed() -> None:
    job = Job()
    with pytest.raises(DumpError, match="save_ckpt failed: OSError: disk full") as own:
        job.writes(1, save=fails)
    assert not own.value.collateral
    with pytest.raises(DumpError, match=r"rank 1 has failed to save its part: .*disk full") as others:
        job.writes(0)
    assert others.value.collateral
    assert job.done == [("save", 0, 7)]


def test_nobody_renames_when_one_does_not_come() -> None:
    with pytest.raises(DumpError, match="rank 1 has not saved its part in time"):
        Job().writes(0, deadline=0.0)


def test_what_was_said_in_an_earlier_attempt_does_not_count() -> None:
    job = Job()
    job.writes(1, attempt=1)
    with pytest.raises(DumpError, match="in time"):
        job.writes(0, attempt=2, deadline=0.0)


def test_a_rename_that_fails_is_a_failed_dump() -> None:
    with pytest.raises(DumpError, match="rename failed: OSError: disk full"):
        Job().writes(0, savers=(0,), rename=fails)


def test_a_newer_attempt_ends_the_waiting_for_others() -> None:
    with pytest.raises(Interrupted):
        Job().writes(0, interrupted=lambda: True)


def test_a_newer_attempt_ends_the_waiting_for_a_save_that_is_stuck() -> None:
    stuck = threading.Event()
    threads = dump.SaveThread(Accelerator())
    with pytest.raises(Interrupted):
        threads.run(lambda: stuck.wait(10), FAR, lambda: True)
    with pytest.raises(DumpError, match="an earlier attempt has not returned"):
        threads.run(lambda: None, FAR, never)
    stuck.set()


def test_a_save_that_does_not_return_in_time_has_failed() -> None:
    stuck = threading.Event()
    with pytest.raises(DumpError, match="has not returned in time"):
        dump.SaveThread(Accelerator()).run(lambda: stuck.wait(10), 0.0, never)
    stuck.set()


def test_the_rename_callback_gets_the_arguments_and_under_mindspore_its_context() -> None:
    heard: list[tuple[object, ...]] = []
    callback = Callback(lambda *arguments: heard.append(arguments), "context")
    dump.bound(callback, "args", mindspore=False)(7)
    dump.bound(callback, "args", mindspore=True)(7)
    assert heard == [(7, "args"), (7, "context")]
