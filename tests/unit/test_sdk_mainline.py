"""Where the training thread and the control thread meet, the process's end, and where the controller is."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from support.sdk_job import MemoryStore

from mindio_tft_patch.adaptors.sdk import place
from mindio_tft_patch.adaptors.sdk.board import SdkBoard
from mindio_tft_patch.adaptors.sdk.enums import ReportState
from mindio_tft_patch.adaptors.sdk.leaving import Leaving
from mindio_tft_patch.adaptors.sdk.mainline import Mainline, Report, Verdict
from mindio_tft_patch.config import Config
from mindio_tft_patch.processor.guard import EXIT_CODE
from mindio_tft_patch.protocol import endpoint
from mindio_tft_patch.protocol.endpoint import Endpoint
from mindio_tft_patch.protocol.keys import new_keys, write_keys
from mindio_tft_patch.protocol.phases import Activity, FaultKind

REPORT = Report(ReportState.RS_UCE, FaultKind.MEMORY, "broken")


def never() -> bool:
    return False


def test_a_report_is_taken_once() -> None:
    mainline = Mainline()
    mainline.enter()
    mainline.arrive(REPORT)
    assert not mainline.inside
    assert mainline.await_event(never) is REPORT
    assert mainline.take_report() is None


def test_a_command_comes_before_a_report() -> None:
    mainline = Mainline()
    mainline.arrive(REPORT)
    assert mainline.await_event(lambda: True) is None
    assert mainline.take_report() is REPORT


def test_jobs_are_done_on_the_way() -> None:
    mainline, done = Mainline(), []
    mainline.submit(lambda: done.append(1))
    mainline.submit(lambda: done.append(2))
    mainline.arrive(REPORT)
    mainline.await_event(never)
    assert done == [1, 2]


def test_the_end_of_training_is_an_event() -> None:
    mainline = Mainline()
    mainline.finish()
    assert mainline.await_event(never) is None
    assert mainline.finished


def test_from_the_verdict_on_the_training_thread_counts_as_inside() -> None:
    mainline = Mainline()
    mainline.arrive(REPORT)
    mainline.release(Verdict.AGAIN)
    assert mainline.inside
    assert mainline.wait_for_verdict() is Verdict.AGAIN
    assert mainline.wait_for_verdict() is Verdict.AGAIN  # whoever asks twice hears the same
    assert mainline.take_report() is None  # it was answered
    mainline.arrive(REPORT)
    assert mainline.wait_for_verdict(0.0) is None


@pytest.mark.parametrize("verdict", [Verdict.LEAVE, Verdict.ALONE])
def test_the_end_of_the_job_stays_the_end(verdict: Verdict) -> None:
    mainline = Mainline()
    mainline.release(verdict)
    mainline.arrive(REPORT)
    assert mainline.wait_for_verdict() is verdict


def test_an_arrival_is_waited_for_until_the_time_is_over_or_something_else_comes() -> None:
    mainline = Mainline()
    assert mainline.await_arrival(0.0, never)
    mainline.enter()
    assert not mainline.await_arrival(0.0, never)
    assert not mainline.await_arrival(10.0, lambda: True)


def test_between_two_updates_a_rank_may_be_at_long_work() -> None:
    board = SdkBoard()
    for activity in (Activity.COMPUTE, Activity.BETWEEN):
        board.enter(activity)
        assert board.snapshot().activity is Activity.EVALUATE
    board.enter(Activity.UPDATE)
    assert board.snapshot().activity is Activity.UPDATE


def test_a_process_whose_job_has_ended_ends() -> None:
    ended, over = [], threading.Event()

    def end(code: int) -> None:
        ended.append(code)
        over.set()

    leaving = Leaving(0.0, end)
    assert not leaving.begun
    leaving.begin()
    assert over.wait(5)
    assert leaving.begun and ended == [EXIT_CODE]


def test_at_the_end_of_the_interpreter_the_connection_is_closed_unless_the_job_has_ended() -> None:
    closed, ended = [], []
    leaving = Leaving(60.0, ended.append)
    leaving._at_exit(lambda: closed.append(1))
    assert (closed, ended) == ([1], [])
    leaving.begin()
    leaving._at_exit(lambda: closed.append(2))
    assert (closed, ended) == ([1], [EXIT_CODE])


def test_the_endpoint_is_in_the_store_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    store, published = MemoryStore(), Endpoint("10.0.0.1", 8000, b"s" * 40, b"p" * 40, b"c" * 40)
    endpoint.publish(store, published)
    monkeypatch.setattr(place, "job_store", lambda config: store)
    for config in (Config(), Config(controller_external=True, started_by_ttprun=True)):
        assert place.find_endpoint(config, "127.0.0.1", 9000) == published


def test_under_a_cluster_manager_it_is_in_the_call_and_the_keys_in_a_file(tmp_path: Path) -> None:
    keys = new_keys()
    write_keys(tmp_path / "keys", keys)
    config = Config(controller_external=True, keys_path=tmp_path / "keys")
    found = place.find_endpoint(config, "10.0.0.1", 9000)
    assert found == Endpoint("10.0.0.1", 9000, keys.server_public, keys.client_public, keys.client_secret)


def test_without_that_file_the_channel_is_open_and_that_is_said_loudly(caplog: pytest.LogCaptureFixture) -> None:
    found = place.find_endpoint(Config(controller_external=True), "10.0.0.1", 9000)
    assert found == Endpoint("10.0.0.1", 9000)
    assert "NOT ENCRYPTED" in caplog.text
