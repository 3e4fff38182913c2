"""The rank's end with a controller in memory; real threads, hence not among the unit tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

import pytest
from support.wire import eventually, ready

from mindio_tft_patch.config import Config
from mindio_tft_patch.errors import ControlError
from mindio_tft_patch.processor.client import Client
from mindio_tft_patch.processor.handlers import Outcome
from mindio_tft_patch.processor.progress import ProgressBoard
from mindio_tft_patch.protocol.endpoint import Endpoint
from mindio_tft_patch.protocol.messages import (
    CommitState,
    Done,
    Failed,
    FaultReport,
    Heartbeat,
    Ready,
    Register,
    Welcome,
)
from mindio_tft_patch.protocol.phases import FaultKind, Phase, Strategy
from mindio_tft_patch.testing import FakeChannel, command

CONFIG = Config(heartbeat_seconds=0.05, retry_times=1)


class Rank:
    def __init__(self) -> None:
        self.channel = FakeChannel(Welcome(0, True))
        self.stops = 0
        self.board = ProgressBoard()
        self.client = Client(
            CONFIG,
            Endpoint("nowhere", 1),
            self.board,
            rank=0,
            world_size=2,
            on_stop=self.stop,
            connect=lambda endpoint: self.channel,
        )

    def stop(self) -> None:
        self.stops += 1


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    made.client.start()
    yield made
    made.client.close()
    assert made.channel.closed


def test_it_registers_and_beats(rank: Rank) -> None:
    rank.board.set_commit(CommitState(3))
    assert isinstance(rank.channel.sent[0], Register)
    beat = rank.channel.wait_for(Heartbeat)
    assert isinstance(beat, Heartbeat)
    eventually(lambda: [one for one in rank.channel.sent if isinstance(one, Heartbeat)][-1].progress.commit.step == 3)


def test_stop_is_called_before_the_main_thread_sees_the_command(rank: Rank) -> None:
    rank.channel.give(command(Phase.STOP))
    do = rank.client.next_command(5.0)
    assert do is not None and do.phase is Phase.STOP
    assert rank.stops == 1
    assert rank.client.attempt == 1


def test_a_command_that_comes_twice_is_carried_out_once(rank: Rank) -> None:
    rank.channel.give(command(Phase.STOP))
    rank.channel.give(command(Phase.STOP))
    assert rank.client.next_command(5.0) is not None
    assert rank.client.next_command(0.2) is None
    assert rank.stops == 1


def test_commands_of_an_older_attempt_are_dropped(rank: Rank) -> None:
    rank.channel.give(command(Phase.STOP, attempt=1))
    rank.channel.give(command(Phase.CLEAN, attempt=1))
    rank.channel.give(command(Phase.STOP, attempt=2))
    rank.channel.give(command(Phase.CLEAN, attempt=1))
    eventually(lambda: rank.stops == 2)
    do = rank.client.next_command(5.0)
    assert do is not None and (do.attempt, do.phase) == (2, Phase.STOP)
    assert rank.client.next_command(0.2) is None


def test_a_stop_that_raises_does_not_end_the_thread(rank: Rank, caplog: pytest.LogCaptureFixture) -> None:
    rank.client._on_stop = lambda: 1 / 0  # type: ignore[assignment,return-value]
    rank.channel.give(command(Phase.STOP))
    assert rank.client.next_command(5.0) is not None
    assert rank.client.connected


def test_answers_and_reports_reach_the_controller(rank: Rank) -> None:
    do = command(Phase.DUMP, attempt=4)
    rank.client.done(do, CommitState(7), Outcome("/path", 9), 1.5)
    assert rank.channel.wait_for(Done) == Done(0, 4, Phase.DUMP, CommitState(7), "/path", 1.5, 9)
    rank.client.failed(do, "disk full", collateral=True)
    assert rank.channel.wait_for(Failed) == Failed(0, 4, Phase.DUMP, "disk full", True)
    rank.board.set_commit(CommitState(6))
    rank.client.report(FaultKind.MEMORY, "bit")
    assert rank.channel.wait_for(FaultReport) == FaultReport(0, FaultKind.MEMORY, "bit", 6)


def test_what_cannot_be_sent_now_is_sent_later(rank: Rank) -> None:
    rank.channel.open = False
    rank.client.report(FaultKind.MEMORY, "bit")
    rank.channel.open = True
    rank.channel.wait_for(FaultReport)


def reports(rank: Rank) -> list[FaultReport]:
    return [message for message in rank.channel.sent if isinstance(message, FaultReport)]


def the_controller_is_started_again(rank: Rank) -> None:
    """It answers a Register that comes after a silence."""
    before = sum(isinstance(message, Register) for message in rank.channel.sent)
    rank.client._heard_at = float("-inf")
    eventually(lambda: sum(isinstance(message, Register) for message in rank.channel.sent) > before)
    eventually(lambda: rank.client._warned)
    rank.channel.give(Welcome(0, True))
    eventually(lambda: rank.client.connected and not rank.client._warned)


def test_a_fault_that_the_controller_has_not_answered_is_reported_to_the_one_after_it(rank: Rank) -> None:
    rank.client.report(FaultKind.MEMORY, "bit")
    eventually(lambda: len(reports(rank)) == 1)
    the_controller_is_started_again(rank)
    eventually(lambda: len(reports(rank)) == 2)
    assert reports(rank)[0] == reports(rank)[1]
    kinds = [type(message) for message in rank.channel.sent if not isinstance(message, Heartbeat)]
    # It must know the rank first. A rank registers again and again until it is answered.
    assert [kind for kind, _ in groupby(kinds)] == [Register, FaultReport, Register, FaultReport]


def obeys(rank: Rank, phase: Phase) -> None:
    rank.channel.give(command(phase))
    assert rank.client.next_command(5.0) is not None


def test_the_consequence_of_a_stop_is_not_reported_again_after_its_recovery(rank: Rank) -> None:
    obeys(rank, Phase.STOP)
    rank.client.report(FaultKind.COLLATERAL, "FORCE STOP")  # what the runtime of a device raises when it is stopped
    obeys(rank, Phase.CLEAN)
    obeys(rank, Phase.RESUME)
    the_controller_is_started_again(rank)
    rank.client.report(FaultKind.NETWORK, "link")
    eventually(lambda: reports(rank)[-1].kind is FaultKind.NETWORK)
    assert [one.kind for one in reports(rank)] == [FaultKind.COLLATERAL, FaultKind.NETWORK]


def test_a_fault_during_a_recovery_is_reported_to_a_controller_that_has_forgotten_that(rank: Rank) -> None:
    obeys(rank, Phase.STOP)
    rank.client.report(FaultKind.COLLATERAL, "FORCE STOP")
    obeys(rank, Phase.CLEAN)
    the_controller_is_started_again(rank)
    eventually(lambda: len(reports(rank)) == 2)


def test_a_command_that_comes_twice_does_not_answer_a_later_fault(rank: Rank) -> None:
    obeys(rank, Phase.RESUME)
    rank.client.report(FaultKind.MEMORY, "bit")
    rank.channel.give(command(Phase.RESUME))
    the_controller_is_started_again(rank)
    eventually(lambda: len(reports(rank)) == 2)


@pytest.mark.parametrize("phase", [Phase.STOP, Phase.EXIT])
def test_a_fault_that_was_answered_is_not_reported_again(rank: Rank, phase: Phase) -> None:
    rank.client.report(FaultKind.MEMORY, "bit")
    obeys(rank, phase)
    the_controller_is_started_again(rank)
    rank.client.report(FaultKind.NETWORK, "link")
    eventually(lambda: reports(rank)[-1].kind is FaultKind.NETWORK)
    assert [one.kind for one in reports(rank)] == [FaultKind.MEMORY, FaultKind.NETWORK]


def test_nothing_is_reported_again_by_a_rank_that_has_left_training(rank: Rank) -> None:
    rank.client.report(FaultKind.MEMORY, "bit")
    rank.client.finished()
    the_controller_is_started_again(rank)
    rank.client.done(command(Phase.STOP), None, Outcome(), 0.0)
    rank.channel.wait_for(Done)
    assert len(reports(rank)) == 1


def test_a_refusal_is_an_error_with_the_reason() -> None:
    made = Rank()
    made.channel = FakeChannel(Welcome(0, False, "it is another job"))
    with pytest.raises(ControlError, match="it is another job"):
        made.client.start()


def test_a_refusal_that_may_end_by_itself_is_asked_again() -> None:
    made = Rank()
    made.client._config = replace(CONFIG, retry_times=5)
    made.channel = FakeChannel(Welcome(0, False, "it is alive", passing=True), Welcome(3, True, returning=True))
    made.client.start()
    assert made.client.returning
    assert made.client.attempt == 3
    made.client.close()


def test_a_refusal_that_does_not_end_is_an_error_with_the_reason() -> None:
    made = Rank()
    made.channel = FakeChannel(*[Welcome(0, False, "it is alive", passing=True)] * 5)
    with pytest.raises(ControlError, match="it is alive"):
        made.client.start()


def test_a_first_process_is_not_returning_and_what_it_offers_last_counts(rank: Rank) -> None:
    assert not rank.client.returning
    rank.client.ready(ready(0, 2, tuple(Strategy)))
    rank.client.ready(ready(0, 2))
    eventually(lambda: [one for one in rank.channel.sent if isinstance(one, Ready)][1:])
    assert rank.client._again() == [ready(0, 2)]


def test_no_answer_is_an_error_that_says_what_was_seen() -> None:
    made = Rank()
    made.channel = FakeChannel()
    with pytest.raises(ControlError, match=r"nobody is there.*TTP_ADDR"):
        made.client.start()
