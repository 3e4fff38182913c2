"""Recovery in place on one rank: what is kept during training for it, and its phases (points 8 to 11).

During training: the data that a step has read, what only this rank knows of a step (handed to its partners at the
gate), marks of the work around a step. After a fault: rebuild, repair, rollback, resume, each in the file of its name.
Nothing of this is there in a job without --enable-hbmfault-repair, --enable-worker-reboot or
--distributed-optimizer-no-replica.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mindio_tft_patch.adaptors.device.interface import Device, partner_group
from mindio_tft_patch.adaptors.device.unconnected import Unconnected
from mindio_tft_patch.adaptors.megatron import moe_statistics, rebuild, reload, repair, resume, rollback, setup_facts
from mindio_tft_patch.adaptors.megatron.data_source import DataSource
from mindio_tft_patch.adaptors.megatron.gate import CommitGate
from mindio_tft_patch.adaptors.megatron.iteration_end import IterationEnd
from mindio_tft_patch.adaptors.megatron.log_state import LogPosition, LogState
from mindio_tft_patch.adaptors.megatron.past import Checkpoint, Past
from mindio_tft_patch.adaptors.megatron.points import write_points_once
from mindio_tft_patch.adaptors.megatron.scrub import Difference, Scrub
from mindio_tft_patch.adaptors.megatron.step_exchange import StepExchange, StepFacts, capacity_bytes, losses_of
from mindio_tft_patch.adaptors.megatron.training_objects import Training
from mindio_tft_patch.adaptors.porting.marks import Marks
from mindio_tft_patch.config import Config
from mindio_tft_patch.errors import RecoveryError
from mindio_tft_patch.processor.handlers import Outcome
from mindio_tft_patch.processor.progress import ProgressBoard
from mindio_tft_patch.protocol.messages import CommitState, Plan, ReplicaSet
from mindio_tft_patch.protocol.phases import Strategy

log = logging.getLogger("mindio_tft_patch.session")

RUN_FOLDER = "TFT_RUN_FOLDER"  # set by ttprun: a folder in memory, the same for all processes of a rank


class InPlace:
    """Recovery in place of one rank.

    Args:
        unconnected: answers the collectives of a set-up without the other ranks, in a process that has come back.

    Attributes:
        returning: this process takes the place of a lost one; until it has resumed.
        report_corruption: tells the controller what differs, and the last step on which it did not.
        no_checkpoint: why no checkpoint could be loaded in place now; rank 0 knows, and the others leave it empty.
        tell_checkpoint: called when that has changed.
    """

    def __init__(
        self, config: Config, board: ProgressBoard, gate: CommitGate, log_state: LogState, unconnected: Unconnected
    ) -> None:
        self.config = config
        self.data = DataSource()
        self.marks = Marks()
        self.ending = IterationEnd(gate)
        self._board = board
        self._gate = gate
        self._log_state = log_state
        self._unconnected = unconnected
        self._store: Any = None
        self._exchange: StepExchange | None = None
        self._position: LogPosition | None = None
        self._place: rollback.Place | None = None
        self._checkpoint: Checkpoint | None = None  # to which a reload goes
        self._rerun_mode: Any = None
        self._replica_sets: tuple[ReplicaSet, ...] = ()
        self.scrub = Scrub(config.scrub_interval, keeps=config.scrub_action == "dump")
        self.report_corruption: Callable[[str, int], None] | None = None
        self.returning = False
        self.no_checkpoint = ""
        self.tell_checkpoint: Callable[[], None] | None = None
        self._training: Training | None = None

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """What the user's flags and the data allow beyond a dump."""
        config, placeable = self.config, self.data.can_place_training
        found = []
        if config.hbmfault_repair:
            found.append(Strategy.RETRY)
        if config.worker_reboot and placeable:
            found.append(Strategy.RESPAWN)
        if (config.worker_reboot or config.no_replica) and placeable:
            found.append(Strategy.RELOAD)
        return tuple(found)

    # During training.

    def start(self, store: Any, *, returning: bool) -> None:
        """The controller has been reached, communication is about to begin.

        Args:
            store: the job's store.
            returning: this process takes the place of a lost one.
        """
        self._store, self.returning = store, returning
        self._log_state.keeps_position = True
        folder = os.environ.get(RUN_FOLDER)
        self.marks.open(Path(folder) if folder else None, self.config.rank, returning=returning)

    def ready(self, training: Training, replica_sets: tuple[ReplicaSet, ...], train: Any, valid: Any) -> None:
        """train() is about to begin with these data iterators."""
        write_points_once(_tensorboard_writer())
        self.data.attach(train, valid, int(training.args.iteration))
        config = self.config
        if config.rank == 0 and not self.data.can_place_training and (config.worker_reboot or config.no_replica):
            log.warning(
                "the training data comes from a loader that is not Megatron's own (--dataloader-type external): it "
                "cannot be read again from a given sample on, so no lost process is started anew and no checkpoint is "
                "loaded in place; such a fault leads to a checkpoint and the end"
            )
        if self.returning:
            training.past.adopt(self._store)
        elif config.rank == 0:
            training.past.publish(self._store)
        self._training = training
        self._look_for_checkpoint()
        self._rerun_mode = resume.current_rerun_mode()
        resume.freeze_setup(collect=not self.returning)  # the others wait for a process that has come back
        self._replica_sets = replica_sets
        dense = next((one.ranks for one in replica_sets if one.name == repair.DENSE), ())
        if len(dense) > 1:
            args = training.args
            room = capacity_bytes(args.num_layers, experts=bool(args.num_experts))
            self._exchange = StepExchange(partner_group(dense), dense, room)

    def around_build_iterators(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wrapper of build_train_valid_test_data_iterators: what rank 0 tells all in it goes through the store."""
        from megatron.training import get_args

        result = self.data.around_build_iterators(wrapped, instance, args, kwargs)
        if self._unconnected.active:
            setup_facts.adopt(self._store, get_args())
        elif self.config.rank == 0:
            setup_facts.publish(self._store, get_args())
        return result

    def around_load_checkpoint(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wrapper of load_checkpoint: a process that has come back gets its state from a partner instead."""
        return (0, 0) if self._unconnected.active else wrapped(*args, **kwargs)

    def begin_save(self, past: Past, step: int, save: Path) -> None:
        """A periodic save is about to begin; rank 0 tells the process that may take its place."""
        leads = self.config.rank == 0
        past.begin_save(step, save if leads else None)
        if leads:
            past.publish(self._store)

    def _look_for_checkpoint(self) -> None:
        """Can anything be loaded in place by now? A reload that would find nothing must not be tried first."""
        training = self._training
        if training is None or self.config.rank != 0 or Strategy.RELOAD not in self.strategies:
            return
        found = training.past.nothing_to_load(training.args)
        changed, self.no_checkpoint = found != self.no_checkpoint, found
        if changed and self.tell_checkpoint is not None:
            self.tell_checkpoint()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around train_step."""
        with self.ending.step():
            if self.ending.repeated is None:
                self.marks.begun = self._next_step()
            yield

    def around_training_log(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wrapper of training_log, around that of log_state.py."""
        with self.ending.log_line():
            result = self._log_state.around_training_log(wrapped, instance, args, kwargs)
        self.marks.logged = max(self.marks.logged, self._next_step())
        return result

    def around_evaluation(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wrapper of evaluate_and_print_results."""
        if self.ending.leaves_out_evaluation:
            return None
        result = wrapped(*args, **kwargs)
        self.marks.evaluated = max(self.marks.evaluated, self._next_step())
        return result

    def around_save(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wrapper of save_checkpoint_and_time(iteration, ...)."""
        if self.ending.leaves_out_save:
            return None
        result = wrapped(*args, **kwargs)
        self.marks.saved = max(self.marks.saved, int(args[0] if args else kwargs["iteration"]))
        if self.no_checkpoint:
            self._look_for_checkpoint()
        return result

    def _next_step(self) -> int:
        from megatron.training import get_args

        return int(get_args().curr_iteration) + 1

    def begin_exchange(self, training: Training) -> Callable[[], None]:
        """The losses of the step are known: begin to hand its facts to the partners.

        Returns:
            To be called at the gate: takes in those of the partners.
        """
        if self.no_checkpoint and training.past.saves:
            self._look_for_checkpoint()  # an asynchronous save is complete some time after its call
        completed = training.state.record.step
        facts = StepFacts(
            losses=losses_of(self.ending.losses),
            statistics=moe_statistics.collected(),
            digests=self.scrub.digests(training, completed),
        )
        receive = self._begin_to_receive(facts)

        def end() -> None:
            with self._board.in_collective():
                everyone = receive()
            training.state.facts, training.state.result = everyone, self._gate.result
            if facts.digests:
                digests = {rank: one.digests for rank, one in everyone.items()}
                for difference in self.scrub.compare(digests, self._replica_sets, training, completed):
                    self._corrupted(difference)

        return end

    def _begin_to_receive(self, facts: StepFacts) -> Callable[[], dict[int, StepFacts]]:
        if self._exchange is None:
            return lambda: {self.config.rank: facts}
        return self._exchange.begin(facts)

    def _corrupted(self, difference: Difference) -> None:
        log.error("silent corruption: %s", difference)
        if self.config.scrub_action != "warn" and self.report_corruption is not None:
            self.report_corruption(str(difference), difference.agreed if self.config.scrub_action == "dump" else 0)

    def committed(self, step: int) -> None:
        """The update of a step is complete: what it has read is used up."""
        self.data.advance(step)

    # After a fault.

    def rebuild(self, plan: Plan, training: Training, device: Device, attempt: int) -> Outcome:
        """Phase rebuild."""
        if plan.strategy in (Strategy.RESPAWN, Strategy.RELOAD) and not self.data.can_place_training:
            raise RecoveryError("rebuild", rollback.NOT_PLACEABLE)
        if plan.strategy is Strategy.RELOAD:
            # Without one, what the ranks hold must stay as it is.
            self._checkpoint = reload.agree(
                training, self._store, leads=self.config.rank == 0, attempt=attempt, check=device.flag.check
            )
        return rebuild.rebuild(
            plan,
            suspect=self.config.rank in plan.faulty and not self.returning,
            model=training.model,
            optimizer=training.optimizer,
            device=device,
            unconnected=self._unconnected,
            attempt=attempt,
            phase_seconds=self.config.phase_timeout_seconds,
            check=device.flag.check,
        )

    def repair(self, plan: Plan, training: Training) -> Outcome:
        """Phase repair."""
        outcome, self._position = repair.repair(
            plan,
            model=training.model,
            optimizer=training.optimizer,
            scheduler=training.scheduler,
            state=training.state,
            log_state=self._log_state,
        )
        return outcome

    def rollback(self, plan: Plan, training: Training) -> Outcome:
        """Phase rollback; for a reload: load the last checkpoint."""
        if plan.strategy is Strategy.RELOAD:
            if self._checkpoint is None:
                raise RecoveryError("rollback", "the ranks have not agreed on a checkpoint to load")
            self._place = reload.load(self._checkpoint, training, self.data, self._log_state, self.ending)
        else:
            self._place = rollback.rollback(
                plan,
                args=training.args,
                state=training.state,
                data=self.data,
                log_state=self._log_state,
                position=self._position,
                marks=self.marks,
                ending=self.ending,
                returning=self.returning,
            )
        self._board.set_commit(CommitState(step=self._place.step))
        return Outcome()

    def resume(self, plan: Plan, training: Training) -> Outcome:
        """Phase resume."""
        if self._place is None:
            raise RecoveryError("resume", "this rank was not rolled back")
        resume.resume(
            self._place,
            args=training.args,
            model=training.model,
            optimizer=training.optimizer,
            rerun_mode=self._rerun_mode,
            checkpointing_context=training.checkpointing_context,
        )
        self._position = self._place = self._checkpoint = None
        self.returning = False
        return Outcome()


def _tensorboard_writer() -> Any:
    from megatron.training import get_tensorboard_writer

    return get_tensorboard_writer()
