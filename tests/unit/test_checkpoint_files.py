"""The files of a dying-gasp checkpoint: old or new, never half."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mindio_tft_patch.adaptors.porting import checkpoint_files as files


@pytest.fixture
def save(tmp_path: Path) -> Path:
    """A save directory with a complete checkpoint of step 5."""
    old = tmp_path / "save" / "iter_0000005"
    old.mkdir(parents=True)
    (old / "model.pt").write_bytes(b"old")
    files.write_tracker(tmp_path / "save", 5)
    return tmp_path / "save"


def written(save: Path, step: int, content: bytes = b"new") -> Path:
    temporary = files.make_temporary(save, step, attempt=1)
    folder = temporary / files.folder_name(step)
    folder.mkdir()
    (folder / "model.pt").write_bytes(content)
    return temporary


def test_a_published_checkpoint_is_in_place_and_named_by_the_tracker(save: Path) -> None:
    path = files.publish(written(save, 7), save, 7)
    assert path == save / "iter_0000007"
    assert (path / "model.pt").read_bytes() == b"new"
    assert files.read_tracker(save) == 7


def test_a_temporary_folder_is_no_checkpoint(save: Path) -> None:
    written(save, 7)
    assert files.read_tracker(save) == 5
    assert files.existing_checkpoint(save, 7, not_before=0.0) is None


def test_a_half_written_folder_of_the_step_is_moved_aside(save: Path) -> None:
    half = save / "iter_0000007"
    half.mkdir()
    (half / "model.pt").write_bytes(b"half")
    files.publish(written(save, 7), save, 7)
    assert (half / "model.pt").read_bytes() == b"new"
    [aside] = save.glob(".tft-aside-*")
    assert (aside / "model.pt").read_bytes() == b"half"


@pytest.mark.parametrize(
    ("tracker", "words"), [(5, "what is left of a save that was not finished"), (7, "an older checkpoint of this step")]
)
def test_what_was_in_the_way_is_called_what_it_is(
    save: Path, tracker: int, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    (save / "iter_0000007").mkdir()
    files.write_tracker(save, tracker)
    files.publish(written(save, 7), save, 7)
    assert f"iter_0000007 was there already, {words}; moved to .tft-aside-" in caplog.text


def test_a_failed_rename_leaves_everything_as_it_was(save: Path) -> None:
    half = save / "iter_0000007"
    half.mkdir()
    (half / "mark").touch()
    temporary = files.make_temporary(save, 7, attempt=1)  # without the folder that is to be renamed
    with pytest.raises(OSError):
        files.publish(temporary, save, 7)
    assert (half / "mark").exists()
    assert files.read_tracker(save) == 5


def test_a_failed_tracker_leaves_the_old_one(save: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        files.write_tracker(save, 7)
    assert files.read_tracker(save) == 5
    assert [path.name for path in save.iterdir() if files.TRACKER in path.name] == [files.TRACKER]


def test_the_checkpoint_that_the_tracker_names_is_complete(save: Path) -> None:
    assert files.existing_checkpoint(save, 5, not_before=0.0) == save / "iter_0000005"


def test_a_torch_dist_checkpoint_without_tracker_is_complete_when_its_last_files_are_there(save: Path) -> None:
    folder = save / "iter_0000007"
    folder.mkdir()
    (folder / ".metadata").write_bytes(b"x")
    assert files.existing_checkpoint(save, 7, not_before=0.0) is None
    (folder / "metadata.json").write_bytes(b"{}")
    assert files.existing_checkpoint(save, 7, not_before=0.0) == folder


def test_a_checkpoint_of_an_earlier_run_is_not_taken_for_ours(save: Path) -> None:
    began = (save / "iter_0000005" / "model.pt").stat().st_mtime + 10
    assert files.existing_checkpoint(save, 5, not_before=began) is None


def test_a_save_that_was_cut_off_over_an_older_checkpoint_is_not_complete(save: Path) -> None:
    folder = save / "iter_0000005"
    for name in (".metadata", "metadata.json"):
        (folder / name).write_bytes(b"x")  # of the older run, as the tracker is
    began = max(file.stat().st_mtime for file in folder.iterdir()) + 10
    (folder / "new.distcp").write_bytes(b"y")
    os.utime(folder / "new.distcp", (began + 1, began + 1))
    assert files.existing_checkpoint(save, 5, not_before=began) is None
    for file in folder.iterdir():
        os.utime(file, (began + 1, began + 1))
    assert files.existing_checkpoint(save, 5, not_before=began) == folder


@pytest.mark.parametrize("content", ["", "release", "12x"])
def test_a_tracker_that_names_no_step_counts_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / files.TRACKER).write_text(content)
    assert files.read_tracker(tmp_path) is None


def test_missing_short_and_absent_files_are_found(save: Path) -> None:
    folder = save / "iter_0000005"
    files.check_complete(folder, {"model.pt": 3})
    with pytest.raises(files.IncompleteError, match="3 bytes; its writer says 4"):
        files.check_complete(folder, {"model.pt": 4})
    with pytest.raises(files.IncompleteError, match=r"other\.pt is not there"):
        files.check_complete(folder, {"model.pt": 3, "other.pt": 1})
    with pytest.raises(files.IncompleteError, match="no rank has written"):
        files.check_complete(folder, {})


def test_only_old_left_overs_are_removed(save: Path) -> None:
    old, fresh = files.make_temporary(save, 7, 1), files.make_temporary(save, 7, 2)
    now = fresh.stat().st_mtime
    os.utime(old, (now - 2 * files.LEFT_OVER_SECONDS,) * 2)
    assert files.remove_left_overs(save, now=now) == [old]
    assert fresh.exists() and not old.exists() and (save / "iter_0000005").exists()


def test_a_path_component_that_is_a_file_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        files.make_temporary(tmp_path / "file" / "save", 7, 1)
