"""What Megatron does in each phase: one method per phase, each in the file of its name."""

from __future__ import annotations

from collections.abc import Callable

from mindio_tft_patch.adaptors.device.interface import Device
from mindio_tft_patch.adaptors.megatron import clean, dump, groups
from mindio_tft_patch.adaptors.megatron.gate import CommitGate
from mindio_tft_patch.adaptors.megatron.in_place import InPlace
from mindio_tft_patch.adaptors.megatron.log_state import LogState
from mindio_tft_patch.adaptors.megatron.training_objects import Training
from mindio_tft_patch.errors import RecoveryError
from mindio_tft_patch.processor.handlers import Outcome
from mindio_tft_patch.processor.progress import ProgressBoard
from mindio_tft_patch.protocol.messages import CommitState, Plan, ReplicaSet
from mindio_tft_patch.protocol.phases import Strategy


class MegatronHandlers:
    """processor.handlers.Handlers for Megatron.

    Args:
        in_place: what recovers without ending the job; None without the flags for it.
        attempt: number of the current recovery.
        dump_seconds: time that a dump may take.

    Attributes:
        training: the objects of the running train(); None before it.
        inside: train() runs, or can be entered again; not before it, nor when it has returned.
    """

    def __init__(
        self,
        *,
        board: ProgressBoard,
        device: Device,
        gate: CommitGate,
        log_state: LogState,
        in_place: InPlace | None,
        rank: int,
        attempt: Callable[[], int],
        dump_seconds: float,
    ) -> None:
        self._board = board
        self._device = device
        self._gate = gate
        self._log_state = log_state
        self._in_place = in_place
        self._rank = rank
        self._attempt = attempt
        self._dump_seconds = dump_seconds
        self.training: Training | None = None
        self.inside = False

    def replica_sets(self) -> tuple[ReplicaSet, ...]:
        """Ranks that hold the same optimizer shards as this one."""
        return groups.replica_sets()

    def strategies(self) -> tuple[Strategy, ...]:
        """What this rank can do beyond exit."""
        if self._in_place is None or not self.inside:
            return (Strategy.DUMP,)
        return (*self._in_place.strategies, Strategy.DUMP)

    def commit_state(self) -> CommitState:
        """Marks of the commit gate."""
        return self._board.commit

    def stop(self) -> None:
        """Phase stop, on the control thread."""
        self._device.stop()

    def arrived(self) -> None:
        """Phase stop, on the main thread."""
        self._device.flag.acknowledge()

    def clean(self, plan: Plan) -> Outcome:
        """Phase clean."""
        return clean.clean(plan, device=self._device, gate=self._gate, rank=self._rank)

    def rebuild(self, plan: Plan) -> Outcome:
        """Phase rebuild: connect all process groups anew."""
        in_place, training = self._ready_for("rebuild")
        return in_place.rebuild(plan, training, self._device, self._attempt())

    def repair(self, plan: Plan) -> Outcome:
        """Phase repair: send or receive the state of faulty ranks."""
        in_place, training = self._ready_for("repair")
        return in_place.repair(plan, training)

    def rollback(self, plan: Plan) -> Outcome:
        """Phase rollback: samples, scheduler, scaler, generators, buffers, data, log; or the last checkpoint."""
        in_place, training = self._ready_for("rollback")
        return in_place.rollback(plan, training)

    def resume(self, plan: Plan) -> Outcome:
        """Phase resume: make train() enterable again."""
        in_place, training = self._ready_for("resume")
        return in_place.resume(plan, training)

    def dump(self, plan: Plan) -> Outcome:
        """Phase dump: the survivors write the checkpoint of the target step."""
        training = self._running("dump")
        with self._device.flag.recovering():
            if plan.target_step < training.state.record.step and self._in_place is not None:
                self._in_place.scrub.go_back(training, plan.target_step)  # later steps are corrupt
            record = training.state.restore()
            if record.step != plan.target_step:
                raise RecoveryError("dump", f"this rank is at step {record.step}, not at {plan.target_step}")
            return dump.write_dump(
                model=training.model,
                optimizer=training.optimizer,
                opt_param_scheduler=training.scheduler,
                iteration=record.step,
                num_floating_point_operations_so_far=record.floating_point_operations,
                plan=plan,
                attempt=self._attempt(),
                args=training.args,
                deadline_seconds=self._dump_seconds,
                check=self._device.flag.check,
                extra_files=self._log_state.files(record.step),
                not_before=training.past.not_before(record.step),
            )

    def pause(self, plan: Plan) -> Outcome:
        """Phase pause: nothing is under way on the device any more; the guard then holds."""
        self._device.synchronize()
        return Outcome()

    def _ready_for(self, phase: str) -> tuple[InPlace, Training]:
        training = self._running(phase)
        if self._in_place is None:
            raise RecoveryError(phase, "no flag asks for recovery in place")
        return self._in_place, training

    def _running(self, phase: str) -> Training:
        if self.training is None:
            raise RecoveryError(phase, "training has not begun on this rank")
        return self.training
