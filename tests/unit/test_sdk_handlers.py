"""One phase at a time: which callback is called with what, and what is a failure of which phase."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.sdk_job import MemoryStore

from mindio_tft_patch.adaptors.sdk.accelerator import Accelerator
from mindio_tft_patch.adaptors.sdk.callbacks import Callbacks
from mindio_tft_patch.adaptors.sdk.enums import RepairType, ReportState
from mindio_tft_patch.adaptors.sdk.handlers import SdkHandlers
from mindio_tft_patch.adaptors.sdk.mainline import Mainline, Report
from mindio_tft_patch.adaptors.sdk.rank_state import Options
from mindio_tft_patch.adaptors.sdk.replicas import layouts
from mindio_tft_patch.adaptors.sdk.updates import Updates
from mindio_tft_patch.errors import Interrupted, RecoveryError
from mindio_tft_patch.processor.progress import ProgressBoard
from mindio_tft_patch.protocol.messages import CommitState, Plan, ReplicaSet
from mindio_tft_patch.protocol.phases import FaultKind, Strategy
from mindio_tft_patch.testing import check_handlers, plan_for_tests

ARGS = ["model", "data"]
ALL = ("stop", "clean", "rebuild_group", "repair", "rollback", "save_ckpt", "rename", "stream_sync", "exit")
MEMORY = Report(ReportState.RS_UCE, FaultKind.MEMORY, "memory")


class Rank:
    """Rank 1 of two that hold the same, after step 7."""

    def __init__(self, *registered: str, **options: Any) -> None:
        self.called: list[tuple[str, tuple[Any, ...]]] = []
        self.returns: dict[str, Any] = {"clean": 0}
        self.raises: dict[str, BaseException] = {}
        self.told: list[Report] = []
        self.callbacks = Callbacks()
        self.updates, self.mainline = Updates(ProgressBoard()), Mainline()
        switches = {"enable_uce": True, "enable_arf": True, "phase_seconds": 0.0, "dump_seconds": 1.0, **options}
        self.handlers = SdkHandlers(
            Options(rank=1, **switches),
            self.callbacks,
            self.updates,
            self.mainline,
            Accelerator(),
            args=lambda: ARGS,
            store=MemoryStore,
            attempt=lambda: 1,
            tell=self.told.append,
            layouts=layouts(1, [{"rank_list": [0, 1], "replica_cnt": 2, "replica_shift": 0}]),
        )
        for name in registered or ALL:
            self.register(name)
        self.updates.start(-1)
        self.updates.end(7)

    def register(self, name: str) -> None:
        def callback(*arguments: Any) -> Any:
            self.called.append((name, arguments))
            if name in self.raises:
                raise self.raises[name]
            return self.returns.get(name)

        self.callbacks.register(name, callback, f"context of {name}")

    def told_of(self, plan: Plan) -> Plan:
        self.handlers.state.plan = plan
        return plan

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.called]


def plan(strategy: Strategy = Strategy.RETRY, *faulty: int, step: int = 7) -> Plan:
    made = plan_for_tests(strategy, target_step=step, ranks=(0, 1), faulty=faulty)
    return msgspec.structs.replace(made, faulty=faulty)


def test_the_contract_of_handlers_is_kept() -> None:
    rank = Rank()
    check_handlers(rank.handlers, rank=1)
    assert rank.handlers.replica_sets() == (ReplicaSet("dense", (0, 1)),)


def test_stop_calls_its_callback_also_when_the_training_thread_is_out_already() -> None:
    rank = Rank()
    rank.mainline.arrive(MEMORY)
    rank.told_of(plan())
    rank.handlers.stop()
    rank.handlers.arrived()
    assert rank.called == [("stop", (ARGS, "context of stop"))]
    assert rank.told == [MEMORY]
    assert rank.updates.stopping


def test_a_training_thread_that_stays_inside_is_a_failed_stop() -> None:
    rank = Rank()
    rank.mainline.enter()
    rank.told_of(plan())
    with pytest.raises(RecoveryError, match="stop: the training thread did not leave"):
        rank.handlers.arrived()


def test_when_the_job_ends_a_training_thread_that_stays_inside_is_not_waited_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[float] = []
    rank = Rank(phase_seconds=60.0)
    monkeypatch.setattr(rank.mainline, "await_arrival", lambda seconds, interrupted: waited.append(seconds) or True)
    for strategy in (Strategy.EXIT, Strategy.RETRY):
        rank.told_of(plan(strategy))
        rank.handlers.arrived()
    assert waited == [3.0, 60.0]


def test_a_newer_stop_ends_the_waiting() -> None:
    rank = Rank(phase_seconds=60.0)
    rank.mainline.enter()
    rank.told_of(plan())
    rank.callbacks.register("stop", lambda *ignored: rank.handlers.stop())
    with pytest.raises(Interrupted):
        rank.handlers.arrived()


def test_a_stop_callback_that_fails_is_a_failed_stop() -> None:
    rank = Rank()
    rank.raises["stop"] = OSError("device gone")
    rank.told_of(plan())
    with pytest.raises(RecoveryError, match="stop: its callback failed: OSError: device gone"):
        rank.handlers.arrived()


@pytest.mark.parametrize(
    ("strategy", "registered", "before_dump", "stops"),
    [
        (Strategy.RETRY, ALL, False, True),
        (Strategy.EXIT, ALL, False, True),
        (Strategy.DUMP, ALL, False, False),
        (Strategy.DUMP, ALL, True, True),
        (Strategy.DUMP, ("save_ckpt",), True, False),
        (Strategy.DUMP, ("stop", "save_ckpt"), True, False),
        (Strategy.EXIT, ("save_ckpt",), False, False),
    ],
)
def test_training_is_stopped_and_cleaned_where_that_is_wanted_and_possible(
    strategy: Strategy, registered: tuple[str, ...], before_dump: bool, stops: bool
) -> None:
    rank = Rank(*registered, stops_before_dump=before_dump)
    rank.told_of(plan(strategy))
    rank.handlers.arrived()
    rank.handlers.clean(plan(strategy))
    assert rank.names == (["stop", "clean"] if stops else [])
    assert rank.updates.stopping  # either way no further update begins


@pytest.mark.parametrize("code", [None, True, False, 3, -1, "0"])
def test_clean_must_return_one_of_three_numbers(code: Any) -> None:
    rank = Rank()
    rank.returns["clean"] = code
    with pytest.raises(RecoveryError, match="it must return 0, 1 or 2"):
        rank.handlers.clean(rank.told_of(plan()))


def test_clean_says_whether_this_rank_had_the_memory_error() -> None:
    rank = Rank()
    rank.handlers.note(MEMORY)
    rank.handlers.clean(rank.told_of(plan()))
    assert rank.called == [("clean", (True, ARGS, "context of clean"))]


def test_a_rank_that_is_not_at_the_target_and_is_not_to_be_filled_fails_in_clean() -> None:
    rank = Rank()
    with pytest.raises(RecoveryError, match="clean: this rank has no complete state of step 8"):
        rank.handlers.clean(rank.told_of(plan(step=8)))
    rank.handlers.clean(rank.told_of(plan(Strategy.RETRY, 1, step=8)))
    rank.handlers.clean(rank.told_of(plan(Strategy.RELOAD, step=8)))


@pytest.mark.parametrize(
    ("asked", "called"),
    [
        (plan(Strategy.RETRY, 0), []),
        (plan(Strategy.RESPAWN, 0), [("rebuild_group", ([0], ARGS, "context of rebuild_group"))]),
        (plan(Strategy.RELOAD, 0), [("rebuild_group", ([0], ARGS, "context of rebuild_group"))]),
        (plan(Strategy.RELOAD), []),
    ],
)
def test_groups_are_built_anew_when_processes_have_come_back(asked: Plan, called: list[Any]) -> None:
    rank = Rank()
    rank.handlers.rebuild(rank.told_of(asked))
    assert rank.called == called


@pytest.mark.parametrize(
    ("returning", "memory", "clean", "kind"),
    [
        (False, True, 0, RepairType.RT_UCE_HIGHLEVEL),
        (False, True, 2, RepairType.RT_UCE_LOWLEVEL),
        (False, False, 0, RepairType.RT_RECV_REPAIR),
        (True, False, 0, RepairType.RT_RECV_REPAIR),
    ],
)
def test_how_a_rank_is_filled_depends_on_what_happened_to_it(
    returning: bool, memory: bool, clean: int, kind: RepairType
) -> None:
    rank = Rank()
    rank.returns["clean"] = clean
    rank.handlers.returning = returning
    if memory:
        rank.handlers.note(MEMORY)
    asked = rank.told_of(plan(Strategy.RESPAWN, 1, step=9))
    rank.handlers.clean(asked)
    rank.handlers.repair(asked)
    step, need_rebuild, _, info, args, context = rank.called[-1][1]
    assert (step, args, context) == (9, ARGS, "context of repair")
    assert info["repair_type"] == kind.value
    assert need_rebuild is (kind is RepairType.RT_UCE_HIGHLEVEL)
    assert rank.updates.commit() == CommitState(step=9)
    assert rank.handlers.state.step == 9


@pytest.mark.parametrize("phase", ["repair", "rollback"])
def test_before_the_first_step_there_is_none_to_go_back_to(phase: str) -> None:
    rank = Rank()
    with pytest.raises(RecoveryError, match="no step was completed yet"):
        getattr(rank.handlers, phase)(rank.told_of(plan(step=0)))
    assert rank.called == []


def test_a_repair_that_nobody_is_registered_for_fails() -> None:
    rank = Rank("stop", "clean", "rollback")
    rank.handlers.repair(rank.told_of(plan()))  # it has no part in it
    with pytest.raises(RecoveryError, match=r"repair: nothing is registered for it .tft_register_repair_handler"):
        rank.handlers.repair(rank.told_of(plan(Strategy.RETRY, 1)))


def test_a_reload_goes_to_the_step_that_the_callback_reports() -> None:
    rank = Rank()

    def repair(*arguments: Any) -> None:
        rank.called.append(("repair", arguments))
        rank.handlers.state.loaded = 5

    rank.callbacks.register("repair", repair)
    rank.handlers.rollback(rank.told_of(plan(Strategy.RELOAD)))
    assert rank.names == ["repair", "rollback"]
    assert rank.called[0][1][0] == 7
    assert rank.called[1][1] == (5, ARGS, "context of rollback")
    assert rank.handlers.commit_state() == CommitState(step=5)


@pytest.mark.parametrize("loaded", [None, 0])
def test_a_reload_that_reports_no_step_fails(loaded: int | None) -> None:
    rank = Rank()
    rank.callbacks.register("repair", lambda *ignored: setattr(rank.handlers.state, "loaded", loaded))
    with pytest.raises(RecoveryError, match=r"rollback: .*tft_report_load_ckpt_step"):
        rank.handlers.rollback(rank.told_of(plan(Strategy.RELOAD)))


def test_after_the_recovery_nothing_of_it_is_left() -> None:
    rank = Rank()
    rank.handlers.note(MEMORY)
    rank.handlers.returning = True
    asked = rank.told_of(plan())
    rank.handlers.arrived()
    rank.handlers.resume(asked)
    assert not rank.updates.stopping and not rank.handlers.returning
    assert rank.handlers.state.plan is None
    rank.handlers.clean(rank.told_of(plan()))
    assert rank.called[-1] == ("clean", (False, ARGS, "context of clean"))


def test_a_fault_that_has_spread_leaves_only_the_checkpoint_of_before() -> None:
    rank = Rank()
    assert set(rank.handlers.strategies()) == {Strategy.RETRY, Strategy.RESPAWN, Strategy.RELOAD, Strategy.DUMP}
    rank.handlers.note(Report(ReportState.RS_RETRY, FaultKind.MEMORY, "the loss is no number"))
    assert rank.handlers.strategies() == (Strategy.RELOAD,)
    assert rank.handlers.commit_state() is None
    rank.callbacks.register("repair", lambda *ignored: setattr(rank.handlers.state, "loaded", 3))
    asked = rank.told_of(plan(Strategy.RELOAD))
    rank.handlers.rollback(asked)
    rank.handlers.resume(asked)
    assert Strategy.RETRY in rank.handlers.strategies()
    assert rank.handlers.commit_state() == CommitState(step=3)


def test_a_dump_of_another_step_is_refused() -> None:
    rank = Rank()
    with pytest.raises(RecoveryError, match="dump: this rank has no complete state of step 6"):
        rank.handlers.dump(rank.told_of(plan(Strategy.DUMP, step=6)))


def test_a_dump_without_a_callback_is_refused() -> None:
    rank = Rank("stop", "clean")
    assert rank.handlers.strategies() == ()
    with pytest.raises(RecoveryError, match="tft_register_save_ckpt_handler"):
        rank.handlers.dump(rank.told_of(plan(Strategy.DUMP)))


@pytest.mark.parametrize(("mindspore", "called"), [(True, [("exit", ("context of exit",))]), (False, [])])
def test_the_exit_callback_is_for_mindspore(mindspore: bool, called: list[Any]) -> None:
    rank = Rank(mindspore=mindspore)
    rank.handlers.leave()
    assert rank.called == called
