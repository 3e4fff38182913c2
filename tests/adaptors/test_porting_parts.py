"""The parts of adaptors/porting that need no second process."""

from __future__ import annotations

import inspect
import os
import signal
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mindio_tft_patch
from mindio_tft_patch.adaptors import porting
from mindio_tft_patch.adaptors.device.stop_flag import StopFlag
from mindio_tft_patch.adaptors.porting import (
    CommitState,
    DumpError,
    Handlers,
    Interrupted,
    Marks,
    Outcome,
    Plan,
    ProgressBoard,
    Protection,
    RecoveryError,
    ReplicaSet,
    ShardSource,
    StepGate,
    Strategy,
    check_copies,
    digest_of,
    parts,
    source_of,
    tensors_of,
    transfers,
    write_together,
)
from mindio_tft_patch.adaptors.porting.in_recovery import InRecovery
from mindio_tft_patch.config import Config, read_config
from mindio_tft_patch.errors import ConfigError
from mindio_tft_patch.processor.guard import Guard
from mindio_tft_patch.processor.pause import PausePoint
from mindio_tft_patch.protocol.messages import Do
from mindio_tft_patch.protocol.phases import FaultKind, Phase
from mindio_tft_patch.testing import FakeHandlers, check_handlers, plan_for_tests

RANKS = (0, 1, 2, 3)
SETS = (ReplicaSet("dense", (0, 2)), ReplicaSet("dense", (1, 3)), ReplicaSet("expert", (1, 3)))
PLAN = Plan(
    Strategy.RESPAWN,
    "test",
    target_step=5,
    faulty=(2, 3),
    participants=RANKS,
    sources=(ShardSource(SETS[0], 0), ShardSource(SETS[1], 1), ShardSource(SETS[2], 1)),
)


# ---------------------------------------------------------------- who sends what to whom


def test_every_faulty_rank_gets_its_shard_from_the_rank_that_speaks_for_it() -> None:
    assert list(transfers(PLAN, "dense")) == [(0, 2), (1, 3)]
    assert source_of(PLAN, 3, "expert") == 1
    assert source_of(PLAN, 2, "expert") is None


def test_a_faulty_rank_without_a_source_is_an_error() -> None:
    with pytest.raises(RecoveryError, match="no source for the expert shard of rank 2"):
        list(transfers(PLAN, "expert"))


def test_a_group_that_cannot_be_cut_is_refused_with_what_to_change() -> None:
    with pytest.raises(ConfigError, match=r"of 3 ranks cannot be cut into 2 copies.*TFT_REPLICAS"):
        parts([0, 1, 2], 2)


# ---------------------------------------------------------------- the gate


def test_a_rank_whose_state_comes_from_elsewhere_only_forgets_its_step() -> None:
    board = ProgressBoard(clock=lambda: 0.0)
    done: list[int] = []

    def interrupted() -> None:
        raise Interrupted

    gate = StepGate(board, barrier=interrupted)
    with pytest.raises(Interrupted):
        gate.commit(1, lambda: done.append(1))
    gate.settle(plan_for_tests(Strategy.RETRY, faulty=(0,), ranks=(0, 1)), 0)
    assert (done, board.commit) == ([], CommitState(step=0))


def test_a_rank_at_the_gate_of_the_target_finishes_its_step_and_its_record() -> None:
    board = ProgressBoard(clock=lambda: 0.0)
    recorded: list[Any] = []

    def interrupted() -> None:
        raise Interrupted

    gate = StepGate(board, barrier=interrupted, record=lambda *what: recorded.append(what))
    with pytest.raises(Interrupted):
        gate.commit(1, lambda: "made")
    gate.settle(plan_for_tests(Strategy.RETRY, target_step=1, ranks=(0, 1)), 0)
    assert (recorded, board.commit) == ([(1, "made")], CommitState(step=1))


# ---------------------------------------------------------------- phases and the stop


class Waiting(FakeHandlers):
    """Every phase looks at the flag, as a wait for other ranks does."""

    def __init__(self, flag: StopFlag) -> None:
        super().__init__(offered=(Strategy.RETRY, Strategy.DUMP))
        self.flag = flag

    def stop(self) -> None:
        self.flag.stop()

    def arrived(self) -> None:
        self.flag.acknowledge()

    def repair(self, plan: Plan) -> Outcome:
        self.flag.check()
        return Outcome(detail="repaired")


def test_a_phase_is_not_ended_by_its_own_stop_and_is_by_a_later_one() -> None:
    flag = StopFlag()
    resumed: list[bool] = []
    handlers = InRecovery(Waiting(flag), flag, lambda: resumed.append(True)).as_handlers()
    handlers.stop()
    with pytest.raises(Interrupted):
        flag.check()
    handlers.arrived()
    assert handlers.repair(PLAN).detail == "repaired"
    handlers.stop()
    with pytest.raises(Interrupted):
        handlers.repair(PLAN)
    handlers.arrived()
    handlers.resume(PLAN)
    flag.check()
    assert resumed == [True]


def test_the_contract_can_be_checked_through_it() -> None:
    flag = StopFlag()
    check_handlers(InRecovery(Waiting(flag), flag).as_handlers(), rank=0)
    lacking: Any = Waiting(flag)
    lacking.repair = None
    with pytest.raises(AssertionError, match=r"point 10 \(repair\): there is no method"):
        check_handlers(InRecovery(lacking, flag).as_handlers(), rank=0)


# ---------------------------------------------------------------- protection


def test_without_its_flag_nothing_is_started_and_training_runs_once() -> None:
    protection = Protection(Config())
    handlers: Handlers = FakeHandlers()
    protection.start(handlers)
    protection.ready(3)
    protection.barrier()
    assert protection.run(lambda: "trained") == "trained"
    protection.boundary(3)
    protection.finish()
    assert not protection.active and protection.client is None and protection.board.commit.step == 3
    with pytest.raises(ValueError, match="mine"):
        protection.run(_raises)


def _raises() -> None:
    raise ValueError("mine")


@pytest.mark.parametrize(
    ("flags", "offered"),
    [
        ([], [Strategy.DUMP]),
        (["--enable-hbmfault-repair"], [Strategy.RETRY, Strategy.DUMP]),
        (["--enable-worker-reboot"], [Strategy.RESPAWN, Strategy.RELOAD, Strategy.DUMP]),
        (["--distributed-optimizer-no-replica"], [Strategy.RELOAD, Strategy.DUMP]),
    ],
)
def test_what_is_offered_is_what_the_flags_ask_for(flags: list[str], offered: list[Strategy]) -> None:
    protection = Protection(read_config(["--enable-high-availability", *flags], {}))
    assert list(protection.offered()) == offered


def test_a_script_with_handlers_of_its_own_beside_the_patched_megatron_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HIGH_AVAILABILITY", "dump")
    monkeypatch.delenv("TFT_ADAPTOR", raising=False)
    with pytest.raises(ConfigError, match="TFT_ADAPTOR=own"):
        Protection()
    monkeypatch.setenv("TFT_ADAPTOR", "own")
    assert Protection().active


def test_the_import_patches_nothing_when_the_framework_has_handlers_of_its_own() -> None:
    mindio_tft_patch.activate(["--enable-high-availability"], {"TFT_ADAPTOR": "own"})
    assert mindio_tft_patch.installation() is None


# ---------------------------------------------------------------- with a process group of one


@pytest.fixture
def alone() -> Iterator[None]:
    """A default group of this process only."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, 1, True, timedelta(seconds=30))
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def protection(tmp_path: Path, alone: None) -> Protection:
    """That of a rank which is recovering."""
    made = Protection(Config(high_availability=True, device="cpu", log_path=tmp_path / "logs"))
    made.open()
    return made


def test_a_process_that_took_the_place_of_another_one_stays_that_after_it_has_resumed(protection: Protection) -> None:
    protection._returning = protection._replaces = True
    protection._resumed()
    assert not protection.returning and protection.replaces


DUMP = plan_for_tests(target_step=7)


def test_a_checkpoint_is_written_compared_and_named_by_the_tracker(protection: Protection, tmp_path: Path) -> None:
    def write(folder: Path) -> list[Path]:
        (folder / "part.pt").write_bytes(b"state")
        return [folder / "part.pt"]

    outcome = write_together(DUMP, protection, tmp_path, write)
    assert outcome == Outcome(detail=str(tmp_path / "iter_0000007"), bytes_moved=5)
    assert (tmp_path / "iter_0000007/part.pt").read_bytes() == b"state"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "7"
    assert not list(tmp_path.glob(".tft-*"))


def test_a_checkpoint_that_the_job_has_just_written_is_not_written_again(
    protection: Protection, tmp_path: Path
) -> None:
    (tmp_path / "iter_0000007").mkdir()
    (tmp_path / "iter_0000007/part.pt").write_bytes(b"periodic")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    outcome = write_together(DUMP, protection, tmp_path, lambda folder: pytest.fail("written again"))
    assert outcome.detail == str(tmp_path / "iter_0000007")


def _with_paths() -> set[str]:
    """Every parameter of a public function, or method of a public class, that is a path by its annotation."""
    found: set[str] = set()
    for name in porting.__all__:
        thing = getattr(porting, name)
        if not getattr(thing, "__module__", "").startswith("mindio_tft_patch.adaptors.porting"):
            continue
        methods = vars(thing).items() if inspect.isclass(thing) else [("", thing)]
        for method, function in methods:
            if inspect.isfunction(function) and (not method.startswith("_") or method == "__init__"):
                hints = {one: str(hint) for one, hint in function.__annotations__.items() if one != "return"}
                label = f"{name}.{method}".rstrip(".")
                found |= {f"{label}({one})" for one, hint in hints.items() if "Path" in hint}
    return found


def test_a_path_may_be_a_str_in_every_public_function(protection: Protection, tmp_path: Path) -> None:
    assert _with_paths() == {"write_together(save)", "write_together(write)", "Marks.open(folder)"}  # all tried here
    save = tmp_path / "save"
    for path in (str(save), os.fspath(tmp_path / "other"), Anywhere(tmp_path / "third")):

        def write(folder: Path) -> list[str]:
            (folder / "part.pt").write_bytes(b"state")
            return [str(folder / "part.pt")]

        outcome = write_together(DUMP, protection, path, write)
        assert outcome == Outcome(detail=os.path.join(path, "iter_0000007"), bytes_moved=5)
        assert Path(outcome.detail, "part.pt").read_bytes() == b"state"
        assert write_together(DUMP, protection, path, write) == Outcome(detail=outcome.detail)  # it is there already
    marks, heir = Marks(), Marks()
    marks.open(str(save), 3, returning=False)
    marks.logged = 4
    heir.open(save, 3, returning=True)
    assert heir.logged == 4


class Anywhere(os.PathLike[str]):
    """A path that is neither a str nor a Path."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __fspath__(self) -> str:
        return str(self._path)


def test_what_cannot_be_written_leaves_older_checkpoints_and_names_the_rank(
    protection: Protection, tmp_path: Path
) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")

    def write(folder: Path) -> list[Path]:
        raise OSError(28, "No space left on device")

    with pytest.raises(DumpError, match=r"rank 0: .*No space left.*untouched") as found:
        write_together(DUMP, protection, tmp_path, write)
    assert not found.value.collateral
    assert [path.name for path in tmp_path.iterdir() if path.name != "logs"] == ["latest_checkpointed_iteration.txt"]


def test_a_file_that_was_not_written_as_its_writer_says_is_found(protection: Protection, tmp_path: Path) -> None:
    def write(folder: Path) -> list[Path]:
        (folder / "part.pt").write_bytes(b"")
        return [folder / "part.pt"]

    with pytest.raises(DumpError, match="has 0 bytes"):
        write_together(DUMP, protection, tmp_path, write)
    assert not (tmp_path / "iter_0000007").exists()


def test_memory_is_made_anew_and_tensors_stay_what_they_are(protection: Protection) -> None:
    whole = torch.ones(8)
    view, other = whole[2:4], torch.full((3,), float("nan"))
    assert protection.renew([whole, view, other]) == 8 * 4 + 3 * 4
    assert not whole.any() and not other.any()
    view.fill_(5.0)
    assert whole[2] == 5.0


def test_copies_are_compared_by_what_every_rank_says(alone: None) -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(4))])
    plan = plan_for_tests(Strategy.RETRY)
    check_copies(plan, {"dense": digest_of(tensors_of(optimizer))})


# ---------------------------------------------------------------- SIGTERM


class _Controller:
    """Has a rank stop and go on; notes what it was told."""

    connected = True

    def __init__(self, in_phase: Callable[[], None]) -> None:
        self.told: list[str] = []
        self.pause = PausePoint()
        self._in_phase = in_phase
        self._commands = [Phase.STOP, Phase.CLEAN, Phase.RESUME]

    def report(self, kind: FaultKind, detail: str, *, step: int | None = None) -> None:
        self.told.append(f"{kind.value} {detail}")

    def next_command(self, timeout_seconds: float) -> Do:
        phase = self._commands.pop(0)
        if phase is Phase.CLEAN:
            self._in_phase()
        return Do(1, phase, PLAN)

    def done(self, do: Do, commit: CommitState | None, outcome: Outcome, seconds: float) -> None:
        self.told.append(do.phase.value)

    def failed(self, do: Do, reason: str, *, collateral: bool = False) -> None:
        raise AssertionError(reason)


def _protected(in_phase: Callable[[Protection], None]) -> tuple[Protection, _Controller]:
    protection: Any = Protection(read_config(["--enable-high-availability"], {"TFT_ADAPTOR": "own"}))
    controller = _Controller(lambda: in_phase(protection))
    protection._client, protection._is_ready = controller, True
    protection._guard = Guard(controller, FakeHandlers(), protection.board, patience_seconds=5)
    return protection, controller


def test_sigterm_during_a_recovery_is_told_when_training_goes_on_and_once() -> None:
    protection, controller = _protected(lambda one: one._on_sigterm(signal.SIGTERM, None))
    runs: list[list[str]] = []

    def train() -> None:
        runs.append(list(controller.told))
        if len(runs) == 1:
            raise Interrupted

    protection.run(train)
    assert runs == [[], ["stop", "clean", "resume", "terminated SIGTERM, during a recovery"]]
    protection.run(lambda: None)
    assert len(controller.told) == 4


def test_without_sigterm_nothing_is_told() -> None:
    protection, controller = _protected(lambda one: None)
    faults = [Interrupted()]

    def train() -> None:
        if faults:
            raise faults.pop()

    protection.run(train)
    assert controller.told == ["stop", "clean", "resume"]
