"""The guard: what a rank does between a fault and going on or leaving."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest

from mindio_tft_patch import logs
from mindio_tft_patch.config import Config
from mindio_tft_patch.errors import ControlError, DumpError, Interrupted
from mindio_tft_patch.processor.guard import EXIT_CODE, Guard
from mindio_tft_patch.processor.handlers import Outcome
from mindio_tft_patch.processor.progress import ProgressBoard
from mindio_tft_patch.protocol.messages import CommitState, Do, Plan
from mindio_tft_patch.protocol.phases import Activity, FaultKind, Phase, Strategy

PLAN = Plan(strategy=Strategy.DUMP, reason="rank 1 died", target_step=3, detail="/ckpt/iter_0000003")


class ScriptedChannel:
    """Hands out commands; None: nothing comes for a second."""

    def __init__(self, *phases: Phase | None, connected: bool = True) -> None:
        self.connected = connected
        self.commands = [None if phase is None else Do(attempt=1, phase=phase, plan=PLAN) for phase in phases]
        self.said: list[Any] = []

    def report(self, kind: FaultKind, detail: str) -> None:
        self.said.append(("report", kind, detail))

    def next_command(self, timeout_seconds: float) -> Do | None:
        return self.commands.pop(0) if self.commands else None

    def done(self, do: Do, commit: CommitState | None, outcome: Outcome, seconds: float) -> None:
        self.said.append(("done", do.phase))

    def failed(self, do: Do, reason: str, *, collateral: bool = False) -> None:
        self.said.append(("failed", do.phase, reason, collateral))


class Recorder:
    """Handlers that note what they were asked for; `broken` phases raise."""

    def __init__(self, *broken: str) -> None:
        self.calls: list[str] = []
        self.broken = broken

    def commit_state(self) -> CommitState:
        return CommitState(step=3)

    def __getattr__(self, name: str) -> Any:
        def phase(*args: Any) -> Outcome:
            self.calls.append(name)
            if name in self.broken:
                raise OSError("No space left on device")
            return Outcome()

        return phase


def guard(channel: ScriptedChannel, handlers: Recorder, **options: Any) -> Guard:
    ticks = iter(range(10**6))
    return Guard(
        channel,
        handlers,  # type: ignore[arg-type]
        ProgressBoard(clock=lambda: 0.0),
        patience_seconds=5,
        clock=lambda: float(next(ticks)),
        **options,
    )


def failing(*errors: BaseException) -> Any:
    left = list(errors)

    def body() -> str:
        if left:
            raise left.pop(0)
        return "trained"

    return body


def test_a_body_that_returns_needs_no_controller() -> None:
    channel = ScriptedChannel()
    assert guard(channel, Recorder()).run(failing()) == "trained"
    assert channel.said == []


def test_a_fault_is_reported_and_the_controllers_phases_run_in_its_order() -> None:
    channel, handlers = ScriptedChannel(Phase.STOP, Phase.CLEAN, Phase.DUMP, Phase.EXIT), Recorder()
    left: list[tuple[str, str]] = []
    with pytest.raises(SystemExit) as exit_info:
        guard(channel, handlers, on_exit=lambda *what: left.append(what)).run(failing(ValueError("bad batch")))
    assert exit_info.value.code == EXIT_CODE
    assert channel.said[0] == ("report", FaultKind.EXCEPTION, "ValueError: bad batch (while in setup)")
    assert handlers.calls == ["arrived", "clean", "dump"]
    assert [word[1] for word in channel.said[1:]] == [Phase.STOP, Phase.CLEAN, Phase.DUMP, Phase.EXIT]
    assert left == [("rank 1 died", "/ckpt/iter_0000003")]


def test_an_interrupted_rank_reports_nothing_of_its_own() -> None:
    channel = ScriptedChannel(Phase.STOP, Phase.EXIT)
    with pytest.raises(SystemExit):
        guard(channel, Recorder()).run(failing(Interrupted()))
    assert [word[0] for word in channel.said] == ["done", "done"]


def test_resume_calls_the_body_again() -> None:
    channel, handlers = ScriptedChannel(Phase.STOP, Phase.CLEAN, Phase.ROLLBACK, Phase.RESUME), Recorder()
    assert guard(channel, handlers).run(failing(Interrupted())) == "trained"
    assert handlers.calls == ["arrived", "clean", "rollback", "resume"]


def test_a_phase_that_fails_is_reported_and_the_next_attempt_obeyed() -> None:
    channel = ScriptedChannel(Phase.STOP, Phase.CLEAN, Phase.DUMP, Phase.EXIT)
    with pytest.raises(SystemExit):
        guard(channel, Recorder("dump")).run(failing(Interrupted()))
    assert ("failed", Phase.DUMP, "OSError: No space left on device", False) in channel.said


class CheckpointException(BaseException):
    """Like torch.distributed.checkpoint's, which is no Exception."""


def test_a_phase_may_fail_with_what_is_no_exception() -> None:
    channel, handlers = ScriptedChannel(Phase.STOP, Phase.DUMP, Phase.EXIT), Recorder()
    handlers.dump = lambda plan: (_ for _ in ()).throw(CheckpointException("rank 1 failed"))  # type: ignore[attr-defined]
    with pytest.raises(SystemExit):
        guard(channel, handlers).run(failing(Interrupted()))
    assert channel.said[1] == ("failed", Phase.DUMP, "CheckpointException: rank 1 failed", False)


def test_a_rank_that_failed_because_of_another_says_so() -> None:
    channel = ScriptedChannel(Phase.STOP, Phase.DUMP, Phase.EXIT)
    handlers = Recorder()
    handlers.dump = lambda plan: (_ for _ in ()).throw(DumpError("rank 2: disk full", collateral=True))  # type: ignore[attr-defined]
    with pytest.raises(SystemExit):
        guard(channel, handlers).run(failing(Interrupted()))
    assert channel.said[1] == ("failed", Phase.DUMP, "DumpError: dump: rank 2: disk full", True)


def test_without_any_command_the_original_error_comes_through() -> None:
    with pytest.raises(ValueError, match="bad batch"):
        guard(ScriptedChannel(), Recorder()).run(failing(ValueError("bad batch")))


def test_a_user_exit_is_left_alone() -> None:
    channel = ScriptedChannel()
    with pytest.raises(SystemExit) as exit_info:
        guard(channel, Recorder()).run(failing(SystemExit(0)))
    assert exit_info.value.code == 0
    assert channel.said == []


def test_last_resort_never_returns_even_when_the_others_go_on() -> None:
    channel = ScriptedChannel(Phase.STOP, Phase.RESUME)
    with pytest.raises(ValueError, match="evaluation"):
        guard(channel, Recorder()).last_resort(ValueError("evaluation"))


NOTHING = Plan(strategy=Strategy.EXIT, reason="rank 0: exception")


def leaves(error: BaseException, plan: Plan, *, trained: bool) -> None:
    channel = ScriptedChannel(Phase.STOP, Phase.EXIT)
    channel.commands = [Do(attempt=1, phase=phase, plan=plan) for phase in (Phase.STOP, Phase.EXIT)]
    one = guard(channel, Recorder())
    if trained:
        one.run(lambda: None)
    one.last_resort(error)


def test_a_mistake_of_the_set_up_ends_the_process_as_if_there_was_no_plugin() -> None:
    with pytest.raises(ValueError, match="MASTER_ADDR expected"):
        leaves(ValueError("MASTER_ADDR expected"), NOTHING, trained=False)


@pytest.mark.parametrize(
    ("error", "plan", "trained"),
    [
        (ValueError("evaluation"), PLAN, True),
        (ValueError("evaluation"), NOTHING, True),
        (ValueError("checkpoint of others"), PLAN, False),
        (RuntimeError("Connection closed by peer"), NOTHING, False),
        (Interrupted(), NOTHING, False),
    ],
)
def test_whoever_trained_or_only_suffers_leaves_with_the_code_for_another_try(
    error: BaseException, plan: Plan, trained: bool
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        leaves(error, plan, trained=trained)
    assert exit_info.value.code == EXIT_CODE


def test_only_causes_are_errors_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mindio_tft_patch.guard")
    for error in (RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer"), ValueError("bad batch")):
        with pytest.raises(SystemExit):
            guard(ScriptedChannel(Phase.STOP, Phase.EXIT), Recorder()).run(failing(error))
    told = [(one.levelname, one.getMessage()) for one in caplog.records if one.exc_info]
    assert [level for level, _ in told] == ["INFO", "ERROR"]
    assert told[1][1] == "training raised ValueError: bad batch"
    assert [one.levelname for one in caplog.records if one.getMessage().startswith("the job ends")] == ["INFO"] * 2


def test_a_returning_process_obeys_before_it_trains() -> None:
    channel = ScriptedChannel(*[None] * 20, Phase.REBUILD, Phase.REPAIR, Phase.ROLLBACK, Phase.RESUME)
    handlers = Recorder()
    protected = guard(channel, handlers)
    assert protected.run(lambda: handlers.calls.append("train") or "trained", returning=True) == "trained"
    assert handlers.calls == ["rebuild", "repair", "rollback", "resume", "train"]
    assert [word[0] for word in channel.said] == ["done"] * 4


def test_a_returning_process_whose_job_ends_leaves_with_the_exit_code() -> None:
    channel = ScriptedChannel(Phase.STOP, Phase.EXIT)
    with pytest.raises(SystemExit) as exit_info:
        guard(channel, Recorder()).run(failing(), returning=True)
    assert exit_info.value.code == EXIT_CODE


def test_a_returning_process_that_has_lost_the_controller_ends() -> None:
    with pytest.raises(ControlError, match="it cannot train by itself"):
        guard(ScriptedChannel(connected=False), Recorder()).run(failing(), returning=True)


def test_between_two_commands_the_controller_may_be_silent_while_it_can_be_reached() -> None:
    channel = ScriptedChannel(Phase.STOP, Phase.CLEAN, *[None] * 50, Phase.REBUILD, Phase.RESUME)
    assert guard(channel, Recorder()).run(failing(Interrupted())) == "trained"


def test_a_controller_that_is_lost_between_two_commands_is_not_waited_for() -> None:
    channel = ScriptedChannel(Phase.STOP, *[None] * 50, Phase.RESUME, connected=False)
    with pytest.raises(ValueError, match="bad batch"):
        guard(channel, Recorder()).run(failing(ValueError("bad batch")))


def test_what_the_frames_of_a_fault_hold_is_free_during_the_recovery() -> None:
    class Activation:
        pass

    kept: list[weakref.ref[Activation]] = []
    left = [1]

    def body() -> str:
        if not left:
            return "trained"
        left.clear()
        activation = Activation()
        kept.append(weakref.ref(activation))
        try:
            raise OSError("cause")
        except OSError as cause:
            raise ValueError("bad batch") from cause

    handlers = Recorder()
    freed: list[bool] = []
    handlers.clean = lambda plan: freed.append(kept[0]() is None) or Outcome()  # type: ignore[attr-defined]
    assert guard(ScriptedChannel(Phase.STOP, Phase.CLEAN, Phase.RESUME), handlers).run(body) == "trained"
    assert freed == [True]


def test_the_traceback_is_logged_before_its_frames_are_freed(caplog: pytest.LogCaptureFixture) -> None:
    guard(ScriptedChannel(Phase.STOP, Phase.RESUME), Recorder()).run(failing(ValueError("bad batch")))
    assert "in body" in caplog.text and "bad batch" in caplog.text


def test_the_board_says_recovery_while_in_the_guard() -> None:
    seen: list[Activity] = []
    channel = ScriptedChannel(Phase.STOP, Phase.EXIT)
    board = ProgressBoard(clock=lambda: 0.0)
    protected = Guard(
        channel,
        Recorder(),  # type: ignore[arg-type]
        board,
        patience_seconds=5,
        on_exit=lambda *_: seen.append(board.activity),
    )
    with pytest.raises(SystemExit):
        protected.run(failing(Interrupted()))
    assert seen == [Activity.RECOVERY]


def test_exceptions_are_logged_with_their_traceback_in_its_own_field(tmp_path: Path) -> None:
    logs.configure(Config(log_path=tmp_path, log_per_process=False), rank=1)
    try:
        channel = ScriptedChannel(Phase.STOP, Phase.DUMP, Phase.EXIT)
        with pytest.raises(SystemExit):
            guard(channel, Recorder("dump")).run(failing(ValueError("first line\nsecond line")))
    finally:
        logs.reset()
    lines = [json.loads(line) for line in (tmp_path / "ttp_log.jsonl").read_text().splitlines()]
    told = {line["message"]: line["exception"].splitlines() for line in lines if "exception" in line}
    assert list(told) == [
        "training raised ValueError: first line",
        "phase dump failed: OSError: No space left on device",
    ]
    for traceback in told.values():
        assert traceback[0] == "Traceback (most recent call last):" and traceback[1].lstrip().startswith("File ")
    assert "\nValueError: first line\nsecond line" in (tmp_path / "ttp_log.log").read_text()
