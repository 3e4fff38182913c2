"""What the Megatron-LM of 2023 does differently in a phase."""

from __future__ import annotations

from mindio_tft_patch.adaptors.megatron.handlers import MegatronHandlers
from mindio_tft_patch.adaptors.megatron_legacy import dump
from mindio_tft_patch.adaptors.megatron_legacy.replica_groups import replica_sets
from mindio_tft_patch.adaptors.megatron_legacy.update import replica_groups
from mindio_tft_patch.errors import RecoveryError
from mindio_tft_patch.processor.handlers import Outcome
from mindio_tft_patch.protocol.messages import Plan, ReplicaSet


class LegacyHandlers(MegatronHandlers):
    """processor.handlers.Handlers for the Megatron-LM of 2023."""

    def replica_sets(self) -> tuple[ReplicaSet, ...]:
        """Ranks that hold the same optimizer shards as this one."""
        groups = replica_groups()
        training = self._running("stop")
        return replica_sets(
            1 if groups is None else groups.copies, sharded=bool(training.args.use_distributed_optimizer)
        )

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
                plan=plan,
                attempt=self._attempt(),
                args=training.args,
                deadline_seconds=self._dump_seconds,
                check=self._device.flag.check,
                extra_files=self._log_state.files(record.step),
                not_before=training.past.not_before(record.step),
            )
