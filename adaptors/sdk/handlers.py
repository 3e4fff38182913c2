"""What a framework's callbacks do in each phase; processor.handlers.Handlers, run on the control thread.

    stop       stop(args, ctx), then wait until the training thread has left the training function
    clean      clean(is_uce_error, args, ctx)
    rebuild    rebuild_group(fault_ranks, args, ctx), when processes have come back
    repair     repair(step, need_rebuild, error_ranks, repair_info, args, ctx), on the ranks that send or receive
    rollback   rollback(step, args, ctx); in a reload repair(...) with RT_LOAD_CKPT before it
    resume     nothing is called; the training thread calls the training function again
    dump       save_ckpt(step, save_info, args, ctx), then rename(step, args) on one rank
    pause      stream_sync()

A training loop without a stop callback cannot be made to leave: its rank offers the checkpoint only, which is then
written while the training thread stays where it is (TTP_STOP_CLEAN_BEFORE_DUMP=0, the default of the original).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mindio_tft_patch.adaptors.sdk import dump, patterns, transfers
from mindio_tft_patch.adaptors.sdk.accelerator import Accelerator
from mindio_tft_patch.adaptors.sdk.callbacks import Callbacks
from mindio_tft_patch.adaptors.sdk.enums import RepairType
from mindio_tft_patch.adaptors.sdk.mainline import Mainline, Report
from mindio_tft_patch.adaptors.sdk.rank_state import Options, Recovering
from mindio_tft_patch.adaptors.sdk.replicas import Layout
from mindio_tft_patch.adaptors.sdk.updates import Updates
from mindio_tft_patch.errors import Interrupted, RecoveryError
from mindio_tft_patch.processor.handlers import Outcome
from mindio_tft_patch.protocol.messages import CommitState, Plan, ReplicaSet
from mindio_tft_patch.protocol.phases import Strategy

log = logging.getLogger("mindio_tft_patch.sdk")

UPDATE_SECONDS = 10.0  # an update that was begun is local work; a stop may wait so long for its end
_EXIT_SECONDS = 3.0  # the controller waits a little longer for a rank that has nothing to save
_SLICE_SECONDS = 0.05
_CLEAN_DONE, _CLEAN_FAILED, _CLEAN_NO_REBUILD = 0, 1, 2
# Which callbacks a strategy needs.
_NEEDS: dict[Strategy, tuple[str, ...]] = {
    Strategy.RETRY: ("stop", "clean", "rollback"),
    Strategy.RESPAWN: ("stop", "clean", "rebuild_group", "repair", "rollback"),
    Strategy.RELOAD: ("stop", "clean", "repair", "rollback"),
    Strategy.DUMP: ("save_ckpt",),
}


@dataclass
class SdkHandlers:
    """Handlers of one rank.

    Args:
        args: what the callbacks get as `args`; asked for at every call, because a framework may set it at every step.
        store: opens the job's store.
        attempt: number of the current recovery.
        tell: takes in what the training thread has reported while it was being stopped.
        returning: this process takes the place of a lost one, and has no state yet.
    """

    options: Options
    callbacks: Callbacks
    updates: Updates
    mainline: Mainline
    accelerator: Accelerator
    args: Callable[[], Any]
    store: Callable[[], dump.MeetingStore]
    attempt: Callable[[], int]
    tell: Callable[[Report], None]
    layouts: tuple[Layout, ...] = ()
    state: Recovering = field(default_factory=Recovering)
    returning: bool = False
    _calling: bool = False

    def __post_init__(self) -> None:
        self._saves = dump.SaveThread(self.accelerator)
        self._complained: set[str] = set()

    # What the guard and the controller ask.

    def replica_sets(self) -> tuple[ReplicaSet, ...]:
        """Who holds the same as this rank."""
        return tuple(layout.replica_set(self.options.rank) for layout in self.layouts)

    def strategies(self) -> tuple[Strategy, ...]:
        """What the switches allow and the registered callbacks can do."""
        options = self.options
        wanted = {
            Strategy.RETRY: options.enable_uce,
            Strategy.RESPAWN: options.enable_arf,
            Strategy.RELOAD: options.enable_uce or options.enable_arf,
            Strategy.DUMP: True,
        }
        if self.state.spread:
            # What the replicas hold is no better, and a checkpoint of it would keep the damage.
            wanted = {Strategy.RELOAD: wanted[Strategy.RELOAD]}
        return tuple(strategy for strategy, on in wanted.items() if on and self._able(strategy))

    def restarts(self) -> bool:
        """May the process of a lost rank be started anew? Memory faults are repaired without, in what is left."""
        return self.options.enable_arf and not self.callbacks.missing("rebuild_group")

    def _able(self, strategy: Strategy) -> bool:
        missing = self.callbacks.missing(*_NEEDS[strategy])
        if missing and strategy.value not in self._complained:
            self._complained.add(strategy.value)
            log.warning("%s is not offered: nothing is registered with %s", strategy.value, ", ".join(missing))
        return not missing

    def commit_state(self) -> CommitState | None:
        """How far the optimizer state is; None: it cannot be used."""
        return CommitState(step=0) if self.returning else self.updates.commit()

    # Phases.

    def stop(self) -> None:
        """A STOP has arrived: called on the thread of the connection, so it only makes a running callback end."""
        self.state.stops_asked += 1
        if self._calling and self.callbacks.get("stop") is not None:
            # The control thread is inside another callback, perhaps blocked; only a stop can free it.
            threading.Thread(target=self._stop_quietly, name="mindio-tft-stop", daemon=True).start()

    def arrived(self) -> None:
        """Phase stop."""
        state = self.state
        state.stops_answered = state.stops_asked
        if self._stops():
            self._stop_training()
        else:
            self.updates.forbid("a checkpoint of the last completed step is being written")
            self._await_update()
        report = self.mainline.take_report()
        if report is not None:
            self.tell(report)

    def clean(self, plan: Plan) -> Outcome:
        """Phase clean."""
        if self._stops():
            self._clean()
        stays = plan.strategy is not Strategy.RELOAD and self.options.rank not in plan.faulty
        if stays and not self.updates.holds(plan.target_step):
            raise RecoveryError("clean", f"this rank has no complete state of step {plan.target_step}")
        return Outcome()

    def rebuild(self, plan: Plan) -> Outcome:
        """Phase rebuild."""
        if transfers.connects_anew(plan):
            self._call("rebuild", "rebuild_group", sorted(plan.faulty))
        return Outcome()

    def repair(self, plan: Plan) -> Outcome:
        """Phase repair."""
        self._require_step("repair", plan)
        self.state.step = plan.target_step
        repair = transfers.refill(plan, self.options.rank, self._refilled_as())
        if repair is not None:
            self._repair("repair", plan.target_step, repair)
        if self.options.rank in plan.faulty:
            self.updates.reached(plan.target_step)
        return Outcome()

    def rollback(self, plan: Plan) -> Outcome:
        """Phase rollback; in a reload every rank loads the last checkpoint first."""
        step = plan.target_step
        if plan.strategy is Strategy.RELOAD:
            step = self._load(plan)
        else:
            self._require_step("rollback", plan)
        self.state.step = step
        self._call("rollback", "rollback", step)
        self.updates.reached(step)
        return Outcome()

    def resume(self, plan: Plan) -> Outcome:
        """Phase resume."""
        self.accelerator.give_memory_back(collect=False)
        state = self.state
        state.no_rebuild = state.memory_fault = state.spread = False
        state.plan = state.loaded = None
        self.returning = False
        self.updates.allow()
        return Outcome()

    def dump(self, plan: Plan) -> Outcome:
        """Phase dump."""
        if not self.updates.holds(plan.target_step):
            raise RecoveryError("dump", f"this rank has no complete state of step {plan.target_step}")
        rank, args = self.options.rank, self.args()
        save, rename = self.callbacks.get("save_ckpt"), self.callbacks.get("rename")
        if save is None:
            raise RecoveryError("dump", "nothing is registered with tft_register_save_ckpt_handler")
        with self._marked():
            place = dump.write(
                rank,
                plan.target_step,
                info=transfers.save_info(plan, rank, self.layouts),
                savers=transfers.savers(plan),
                meeting=dump.Meeting(self.store, self.attempt()),
                threads=self._saves,
                save=lambda step, info: save.function(step, info, args, save.context),
                rename=None if rename is None else dump.bound(rename, args, mindspore=self.options.mindspore),
                deadline=time.monotonic() + self.options.dump_seconds,
                interrupted=self._interrupted,
            )
        return Outcome(detail=place)

    def pause(self, plan: Plan) -> Outcome:
        """Phase pause: wait for what training has queued on the device."""
        callback = self.callbacks.get("stream_sync")
        if callback is not None:
            self._on_control_thread(lambda: self._run("pause", callback.function))
        return Outcome()

    def leave(self) -> None:
        """The job ends; under MindSpore the framework ends its process itself."""
        callback = self.callbacks.get("exit")
        if self.options.mindspore and callback is not None:
            self._run("exit", callback.function, callback.context)

    # In detail.

    def note(self, report: Report) -> None:
        """The training thread has left the training function with this report."""
        self.state.memory_fault = self.state.memory_fault or report.state in patterns.MEMORY_STATES
        if report.state in patterns.SPREADING:
            self.state.spread = True
            self.updates.corrupted()

    def _stops(self) -> bool:
        """Is the training thread to leave the training function?"""
        plan = self.state.plan
        able = not self.callbacks.missing("stop", "clean")
        wanted = plan is None or plan.strategy is not Strategy.DUMP or self.options.stops_before_dump
        return able and wanted

    def _stop_training(self) -> None:
        # An update that was begun is ended first: a rank that is stopped in the middle of it has no state to give.
        self._await_update()
        self.updates.forbid("training was stopped because of a fault")
        callback = self.callbacks.get("stop")
        assert callback is not None
        self._run("stop", callback.function, self.args(), callback.context)
        ends = self.state.plan is not None and self.state.plan.strategy is Strategy.EXIT
        seconds = min(_EXIT_SECONDS, self.options.phase_seconds) if ends else self.options.phase_seconds
        if not self.mainline.await_arrival(seconds, self._interrupted):
            if self._interrupted():
                raise Interrupted
            raise RecoveryError("stop", "the training thread did not leave the training function")

    def _await_update(self) -> None:
        deadline = time.monotonic() + UPDATE_SECONDS
        while self.mainline.inside and not self._interrupted() and time.monotonic() < deadline:
            if self.updates.wait_until_ended(_SLICE_SECONDS):
                return

    def _stop_quietly(self) -> None:
        callback = self.callbacks.get("stop")
        assert callback is not None
        try:
            self.accelerator.use()
            callback.function(self.args(), callback.context)
        except Exception:
            log.exception("the stop callback failed while another callback was running")

    def _clean(self) -> None:
        callback = self.callbacks.get("clean")
        assert callback is not None
        code = self._run("clean", callback.function, self.state.memory_fault, self.args(), callback.context)
        if code not in (_CLEAN_DONE, _CLEAN_FAILED, _CLEAN_NO_REBUILD) or isinstance(code, bool):
            raise RecoveryError("clean", f"the clean callback returned {code!r}; it must return 0, 1 or 2")
        if code == _CLEAN_FAILED:
            raise RecoveryError("clean", "the clean callback returned 1: it has failed")
        self.state.no_rebuild = code == _CLEAN_NO_REBUILD
        self.accelerator.give_memory_back()

    def _refilled_as(self) -> RepairType:
        if self.returning or not self.state.memory_fault:
            return RepairType.RT_RECV_REPAIR
        return RepairType.RT_UCE_LOWLEVEL if self.state.no_rebuild else RepairType.RT_UCE_HIGHLEVEL

    def _load(self, plan: Plan) -> int:
        rebuilds = self.state.memory_fault and not self.state.no_rebuild and not self.returning
        kind = RepairType.RT_LOAD_REBUILD if rebuilds else RepairType.RT_LOAD_CKPT
        self.state.loaded = None
        repair = transfers.load(plan, self.options.rank, self.layouts, kind)
        self._repair("rollback", max(1, self.updates.step), repair)
        loaded = self.state.loaded
        if not loaded:
            raise RecoveryError(
                "rollback", "the repair callback has not reported the loaded step (tft_report_load_ckpt_step)"
            )
        return loaded

    def _repair(self, phase: str, step: int, repair: transfers.Repair) -> None:
        self._call(phase, "repair", step, repair.need_rebuild, repair.error_ranks, repair.repair_info)

    def _require_step(self, phase: str, plan: Plan) -> None:
        if plan.target_step < 1:
            raise RecoveryError(phase, "no step was completed yet, so that there is none to go back to")

    def _call(self, phase: str, name: str, *arguments: Any) -> None:
        callback = self.callbacks.get(name)
        if callback is None:
            raise RecoveryError(phase, f"nothing is registered for it ({self.callbacks.missing(name)[0]})")
        self._run(phase, callback.function, *arguments, self.args(), callback.context)

    def _run(self, phase: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a callback. What a newer stop does to it is no failure of it."""
        with self._marked():
            try:
                self.accelerator.use()
                return function(*arguments)
            except Exception as problem:
                if self._interrupted():
                    raise Interrupted from problem
                raise RecoveryError(phase, f"its callback failed: {type(problem).__name__}: {problem}") from problem

    def _on_control_thread(self, job: Callable[[], object]) -> None:
        """Training thread: have the control thread do something, and wait for it."""
        done = threading.Event()
        problems: list[BaseException] = []

        def body() -> None:
            try:
                job()
            except BaseException as problem:
                problems.append(problem)
            done.set()

        self.mainline.submit(body)
        while not done.wait(_SLICE_SECONDS):
            if self._interrupted():
                raise Interrupted
        if problems:
            raise problems[0]

    def _marked(self) -> _Calling:
        return _Calling(self)

    def _interrupted(self) -> bool:
        return self.state.stops_asked > self.state.stops_answered


class _Calling:
    """Marks that the control thread is inside a callback."""

    def __init__(self, handlers: SdkHandlers) -> None:
        self._handlers = handlers

    def __enter__(self) -> None:
        self._handlers._calling = True

    def __exit__(self, *ignored: object) -> None:
        self._handlers._calling = False
