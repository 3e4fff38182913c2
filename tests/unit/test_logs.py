from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindio_tft_patch import logs
from mindio_tft_patch.config import Config

logger = logging.getLogger("mindio_tft_patch.test")


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    logs.reset()
    logs.CONTEXT.__init__()  # type: ignore[misc]


def test_a_line_goes_to_the_text_log_and_to_the_json_log_with_rank_attempt_and_phase(tmp_path: Path) -> None:
    logs.configure(Config(log_path=tmp_path / "new" / "logs"), rank=3)
    logs.CONTEXT.attempt, logs.CONTEXT.phase = 2, "dump"
    logger.info("written %d", 5, extra={"fields": {"bytes": 7}})
    folder = tmp_path / "new" / "logs"
    text = (folder / f"ttp_log.log.{os.getpid()}").read_text()
    assert "[rank 3 attempt 2 dump] mindio_tft_patch.test: written 5" in text
    line = json.loads((folder / f"ttp_log.jsonl.{os.getpid()}").read_text())
    assert {key: line[key] for key in ("rank", "attempt", "phase", "message", "bytes", "level")} == {
        "rank": 3,
        "attempt": 2,
        "phase": "dump",
        "message": "written 5",
        "bytes": 7,
        "level": "INFO",
    }


def test_one_file_for_all_has_no_process_id_in_its_name(tmp_path: Path) -> None:
    logs.configure(Config(log_path=tmp_path, log_per_process=False))
    logger.info("x")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["ttp_log.jsonl", "ttp_log.log"]


def test_the_level_is_kept_and_warnings_of_the_configuration_are_logged(tmp_path: Path) -> None:
    logs.configure(Config(log_path=tmp_path, log_per_process=False, log_level="WARNING", warnings=("TTP_PORT is odd",)))
    logger.info("not this")
    text = (tmp_path / "ttp_log.log").read_text()
    assert "TTP_PORT is odd" in text
    assert "not this" not in text


@pytest.mark.parametrize(
    ("role", "rank", "ttprun", "told"),
    [
        ("launcher", None, True, True),
        ("processor", 0, True, False),
        ("processor", 0, False, True),
        ("processor", 1, False, False),
    ],
)
def test_a_warning_of_the_configuration_is_said_by_one_process_of_the_job(
    tmp_path: Path, role: str, rank: int | None, ttprun: bool, told: bool
) -> None:
    config = Config(
        log_path=tmp_path,
        log_per_process=False,
        rank=rank or 0,
        started_by_ttprun=ttprun,
        warnings=("TTP_PORT is odd",),
    )
    logs.configure(config, role=role, rank=rank)
    assert (tmp_path / "ttp_log.log").read_text().count("TTP_PORT is odd") == int(told)


def test_standard_output_takes_the_place_of_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(Config(log_path=tmp_path, log_stdout=True))
    logger.info("seen")
    assert "seen" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_symbolic_link_is_not_written_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    logs.configure(Config(log_path=tmp_path / "link"))
    logger.warning("goes to the terminal")
    assert list((tmp_path / "real").iterdir()) == []
    shown = capsys.readouterr().err
    assert "is a symbolic link" in shown
    assert "goes to the terminal" in shown


def test_a_log_file_that_is_a_symbolic_link_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "ttp_log.log").symlink_to(tmp_path / "target")
    logs.configure(Config(log_path=tmp_path / "logs", log_per_process=False))
    logger.info("x")
    assert not (tmp_path / "target").exists()


def test_a_folder_that_cannot_be_made_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    logs.configure(Config(log_path=tmp_path / "file" / "logs"))
    logger.error("still said")
    shown = capsys.readouterr().err
    assert "TTP_LOG_PATH" in shown
    assert "still said" in shown


def test_a_disk_that_is_full_is_said_once_and_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(Config(log_path=tmp_path, log_per_process=False))
    for handler in logging.getLogger(logs.ROOT).handlers:
        if isinstance(handler, logging.FileHandler):
            handler.setStream(open("/dev/full", "w"))  # noqa: SIM115 - the handler closes it
    logger.info("one")
    logger.info("two")
    assert capsys.readouterr().err.count("the log cannot be written") == 2  # once a file


def test_a_second_configuration_replaces_the_first(tmp_path: Path) -> None:
    logs.configure(Config(log_path=tmp_path, log_per_process=False))
    logs.configure(Config(log_path=tmp_path, log_per_process=False))
    logger.info("once")
    assert (tmp_path / "ttp_log.log").read_text().count("once") == 1


def test_how_long_something_took_is_logged_also_when_it_raises(tmp_path: Path) -> None:
    logs.configure(Config(log_path=tmp_path, log_per_process=False))
    with pytest.raises(ValueError, match="x"), logs.timed(logger, "the work"):
        raise ValueError("x")
    line = json.loads((tmp_path / "ttp_log.jsonl").read_text())
    assert line["what"] == "the work"
    assert line["message"].startswith("the work: failed in")
