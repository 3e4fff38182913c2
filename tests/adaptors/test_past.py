"""Which checkpoint a reload goes to, and that all ranks go to the same; what a dump takes for its own."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from mindio_tft_patch.adaptors.megatron import reload
from mindio_tft_patch.adaptors.megatron.past import Checkpoint, Past, start_of
from mindio_tft_patch.adaptors.porting import checkpoint_files as files
from mindio_tft_patch.errors import RecoveryError


def checkpoint(folder: Path, step: int, *, tracker: int | None = None) -> None:
    """A checkpoint of `step`, and the tracker written after it."""
    (folder / files.folder_name(step)).mkdir(parents=True, exist_ok=True)
    (folder / files.folder_name(step) / "model.pt").write_bytes(b"x")
    files.write_tracker(folder, step if tracker is None else tracker)


def arguments(save: Path, load: Path | None, iteration: int, **changes: Any) -> SimpleNamespace:
    known = {"finetune": False, "no_load_optim": None, "ckpt_step": None, "save": str(save), "iteration": iteration}
    return SimpleNamespace(**{**known, "load": None if load is None else str(load), **changes})


def started(args: SimpleNamespace) -> Past:
    return Past(start_of(args))


def test_a_job_goes_back_to_what_it_has_saved(tmp_path: Path) -> None:
    checkpoint(tmp_path, 5)
    args = arguments(tmp_path, tmp_path, 5)
    past = started(args)
    assert past.newest(args) == Checkpoint(str(tmp_path), 5)
    past.begin_save(8, tmp_path)
    assert past.newest(args).step == 5  # the save was cut off
    checkpoint(tmp_path, 8)
    assert past.newest(args).step == 8


@pytest.mark.parametrize("changes", [{"finetune": True}, {"no_load_optim": True}])
def test_a_job_that_took_only_weights_does_not_go_back_to_their_checkpoint(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    checkpoint(tmp_path / "pre", 10)
    args = arguments(tmp_path / "save", tmp_path / "pre", 10, **changes)
    past = started(args)
    with pytest.raises(RecoveryError, match="saved none yet"):
        past.newest(args)
    past.begin_save(3, tmp_path / "save")
    checkpoint(tmp_path / "save", 3)
    assert past.newest(args).step == 3


def test_a_job_that_started_from_an_older_step_goes_back_to_that_step(tmp_path: Path) -> None:
    checkpoint(tmp_path, 5)
    checkpoint(tmp_path, 10)
    args = arguments(tmp_path, tmp_path, 5, ckpt_step=5)
    past = started(args)
    assert past.newest(args).step == 5
    past.begin_save(10, tmp_path)  # over the one of the other time line, and cut off
    assert past.newest(args).step == 5
    checkpoint(tmp_path, 10)
    assert past.newest(args).step == 10


def test_a_megatron_that_loads_only_what_the_tracker_names_is_not_sent_elsewhere(tmp_path: Path) -> None:
    checkpoint(tmp_path, 5, tracker=10)
    args = arguments(tmp_path, tmp_path, 5)
    past = started(args)
    del args.ckpt_step
    with pytest.raises(RecoveryError):
        past.newest(args)


def test_an_older_tracker_in_the_save_folder_is_not_followed(tmp_path: Path) -> None:
    checkpoint(tmp_path / "save", 100)
    checkpoint(tmp_path / "other", 7)
    args = arguments(tmp_path / "save", tmp_path / "other", 7)
    assert started(args).newest(args) == Checkpoint(str(tmp_path / "other"), 7)
    anew = arguments(tmp_path / "save", None, 0)
    with pytest.raises(RecoveryError):
        started(anew).newest(anew)


def test_the_process_that_takes_the_place_of_rank_0_knows_it_too(tmp_path: Path) -> None:
    store, args = dist.HashStore(), arguments(tmp_path, tmp_path, 5)
    checkpoint(tmp_path, 5)
    past = started(args)
    past.begin_save(9, tmp_path)
    past.publish(store)
    checkpoint(tmp_path, 9)
    heir = Past()
    heir.adopt(store)
    assert heir.newest(args) == past.newest(args) == Checkpoint(str(tmp_path), 9)
    nobody = Past()
    nobody.adopt(dist.HashStore())
    with pytest.raises(RecoveryError):
        nobody.newest(args)


def test_whether_there_is_anything_to_load_is_known_before_it_is_needed(tmp_path: Path) -> None:
    args = arguments(tmp_path, None, 0)
    past = started(args)
    assert past.nothing_to_load(args).startswith("there is no checkpoint to which all could go back: the job has saved")
    past.begin_save(3, tmp_path)
    assert past.nothing_to_load(args)
    checkpoint(tmp_path, 3)
    assert past.nothing_to_load(args) == ""


def test_the_other_ranks_follow_rank_0_whatever_they_know(tmp_path: Path) -> None:
    checkpoint(tmp_path, 5)
    args, store = arguments(tmp_path, tmp_path, 5), dist.HashStore()
    lead: Any = SimpleNamespace(args=args, past=started(args))
    other: Any = SimpleNamespace(args=args, past=Past())

    def agree(training: Any, attempt: int) -> Checkpoint:
        return reload.agree(training, store, leads=training is lead, attempt=attempt, check=_gone)

    assert agree(lead, 1) == agree(other, 1) == Checkpoint(str(tmp_path), 5)
    lead.past, other.past = Past(), started(args)
    for training in (lead, other):
        with pytest.raises(RecoveryError, match="saved none yet"):
            agree(training, 2)
    with pytest.raises(ConnectionError):  # rank 0 does not come
        agree(other, 3)


def _gone() -> None:
    raise ConnectionError


def test_a_dump_takes_only_files_of_the_last_save_for_its_own(tmp_path: Path) -> None:
    checkpoint(tmp_path, 7)
    file = tmp_path / files.folder_name(7) / "model.pt"
    past = Past()
    assert files.existing_checkpoint(tmp_path, 7, not_before=past.not_before(7)) is not None
    past.begin_save(7)
    os.utime(file, (time.time() + 1, time.time() + 1))
    assert files.existing_checkpoint(tmp_path, 7, not_before=past.not_before(7)) is not None
    os.utime(file, (time.time() - 5, time.time() - 5))
    assert files.existing_checkpoint(tmp_path, 7, not_before=past.not_before(7)) is None


def test_files_from_before_a_reload_are_not_taken_for_those_after_it(tmp_path: Path) -> None:
    past = Past()
    past.begin_save(7)
    checkpoint(tmp_path, 7)
    past.went_back()
    os.utime(tmp_path / files.folder_name(7) / "model.pt", (time.time() - 1, time.time() - 1))
    assert files.existing_checkpoint(tmp_path, 7, not_before=past.not_before(7)) is None
