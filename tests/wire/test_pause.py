"""A rank that holds between two steps: what its main thread does, and two real ranks that are told by a manager."""

from __future__ import annotations

import threading
from collections.abc import Callable

from support.wire import eventually

from mindio_tft_patch.errors import Interrupted
from mindio_tft_patch.processor.guard import Guard
from mindio_tft_patch.processor.handlers import Outcome
from mindio_tft_patch.processor.pause import PausePoint
from mindio_tft_patch.processor.progress import ProgressBoard
from mindio_tft_patch.protocol.messages import CommitState, Do, Plan
from mindio_tft_patch.protocol.phases import Activity, FaultKind, Phase, Strategy
from mindio_tft_patch.testing import FakeHandlers


def pause(target: int = 0, attempt: int = 1) -> Do:
    return Do(attempt, Phase.PAUSE, Plan(Strategy.RETRY, "test", target_step=target))


def resume(attempt: int = 2) -> Do:
    return Do(attempt, Phase.RESUME, Plan(Strategy.RETRY, "test"))


class FakeChannel:
    """Notes what a rank says."""

    def __init__(self) -> None:
        self.pause = PausePoint()
        self.connected = True
        self.said: list[tuple[str, int]] = []

    def report(self, kind: FaultKind, detail: str) -> None:
        self.said.append((kind.value, 0))

    def next_command(self, timeout_seconds: float) -> Do | None:
        return None

    def done(self, do: Do, commit: CommitState | None, outcome: Outcome, seconds: float) -> None:
        self.said.append((do.phase.value, 0 if commit is None else commit.step))

    def failed(self, do: Do, reason: str, *, collateral: bool = False) -> None:
        self.said.append(("failed", 0))


class Rank:
    """A thread that comes to the boundary after step 7, and the channel whose control thread the test is."""

    def __init__(self, failing: frozenset[Phase] = frozenset(), clock: Callable[[], float] | None = None) -> None:
        self.channel = FakeChannel()
        self.handlers = FakeHandlers(commit=CommitState(7), failing=failing)
        self.board = ProgressBoard()
        clocked = {} if clock is None else {"clock": clock}
        self.guard = Guard(self.channel, self.handlers, self.board, patience_seconds=20.0, **clocked)  # type: ignore[arg-type]
        self.ended: BaseException | str = ""
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.guard.boundary(7)
            self.ended = "goes on"
        except BaseException as error:
            self.ended = error

    def start(self) -> Rank:
        self.thread.start()
        return self

    def holds(self) -> None:
        eventually(lambda: self.board.activity is Activity.PAUSE)


def test_a_rank_that_holds_says_so_when_its_device_is_idle_and_goes_on_when_told() -> None:
    rank = Rank()
    rank.channel.pause.order(pause(), completed=7)
    rank.start().holds()
    assert rank.handlers.called == []
    rank.channel.pause.order(pause(7, attempt=2), completed=7)
    eventually(lambda: rank.channel.said)
    assert rank.channel.said == [("pause", 7)] and rank.handlers.called == ["pause"]
    rank.channel.pause.order(resume(), completed=7)
    rank.thread.join(10)
    assert rank.ended == "goes on" and rank.board.activity is not Activity.PAUSE


def test_a_rank_that_cannot_hold_says_so_and_waits_for_what_the_others_do() -> None:
    rank = Rank(failing=frozenset({Phase.PAUSE}))
    rank.channel.pause.order(pause(7, attempt=2), completed=7)
    rank.start()
    eventually(lambda: rank.channel.said)
    assert rank.channel.said == [("failed", 0)] and rank.ended == ""
    rank.channel.pause.order(resume(), completed=7)
    rank.thread.join(10)
    assert rank.ended == "goes on"


def test_stop_sends_a_rank_that_holds_to_the_guard() -> None:
    rank = Rank()
    rank.channel.pause.order(pause(7, attempt=2), completed=7)
    rank.start()
    eventually(lambda: rank.channel.said)
    rank.channel.pause.stop()
    rank.thread.join(10)
    assert isinstance(rank.ended, Interrupted)


def test_a_rank_whose_controller_is_gone_does_not_hold_for_ever() -> None:
    now = [0.0]
    rank = Rank(clock=lambda: now[0])
    rank.channel.pause.order(pause(7, attempt=2), completed=7)
    rank.start().holds()
    now[0] = 1000.0
    assert rank.ended == ""  # it is connected
    rank.channel.connected = False
    eventually(lambda: now.__setitem__(0, now[0] + 5.0) or rank.ended)
    assert rank.ended == "goes on"
