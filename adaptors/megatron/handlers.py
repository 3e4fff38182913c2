"""What Megatron does in each phase: one method per phase, each in the file of its name.

Points 8 to 10 (rebuild, repair, resume in place) are not offered yet: `strategies` does not list them, and the
controller never asks for what a rank did not list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mindio_tft_patch.adaptors.device.interface import Device
from mindio_tft_patch.adaptors.megatron import clean, dump, groups
from mindio_tft_patch.adaptors.megatron.gate import CommitGate
from mindio_tft_patch.adaptors.megatron.log_state import LogState
from mindio_tft_patch.adaptors.megatron.train_state import TrainState
from mindio_tft_patch.errors import RecoveryError
from mindio_tft_patch.processor.handlers import Outcome
from mindio_tft_patch.processor.progress import ProgressBoard
from mindio_tft_patch.protocol.messages import CommitState, Plan, ReplicaSet
from mindio_tft_patch.protocol.phases import Strategy


@dataclass
class Training:
    """The objects of a running train()."""

    args: Any
    model: list[Any]
    optimizer: Any
    scheduler: Any
    state: TrainState


class MegatronHandlers:
    """processor.handlers.Handlers for Megatron.

    Args:
        attempt: number of the current recovery.
        dump_seconds: time that a dump may take.
    """

    def __init__(
        self,
        *,
        board: ProgressBoard,
        device: Device,
        gate: CommitGate,
        log_state: LogState,
        attempt: Callable[[], int],
        dump_seconds: float,
    ) -> None:
        self._board = board
        self._device = device
        self._gate = gate
        self._log_state = log_state
        self._attempt = attempt
        self._dump_seconds = dump_seconds
        self.training: Training | None = None

    def replica_sets(self) -> tuple[ReplicaSet, ...]:
        """Ranks that hold the same optimizer shards as this one."""
        return groups.replica_sets()

    def strategies(self) -> tuple[Strategy, ...]:
        """What this rank can do beyond exit."""
        return (Strategy.DUMP,)

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
        return clean.clean(plan, device=self._device, gate=self._gate)

    def rebuild(self, plan: Plan) -> Outcome:
        """Phase rebuild: not offered yet."""
        raise RecoveryError("rebuild", "in-place recovery is not offered by this adaptor")

    def repair(self, plan: Plan) -> Outcome:
        """Phase repair: not offered yet."""
        raise RecoveryError("repair", "in-place recovery is not offered by this adaptor")

    def rollback(self, plan: Plan) -> Outcome:
        """Phase rollback: samples, scheduler, scaler, generators, buffers."""
        self._running("rollback").state.restore()
        return Outcome()

    def resume(self, plan: Plan) -> Outcome:
        """Phase resume: not offered yet."""
        raise RecoveryError("resume", "in-place recovery is not offered by this adaptor")

    def dump(self, plan: Plan) -> Outcome:
        """Phase dump: the survivors write the checkpoint of the target step."""
        training = self._running("dump")
        with self._device.flag.recovering():
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
            )

    def _running(self, phase: str) -> Training:
        if self.training is None:
            raise RecoveryError(phase, "training has not begun on this rank")
        return self.training
