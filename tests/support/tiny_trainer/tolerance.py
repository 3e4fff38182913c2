"""The fault tolerance of the tiny trainer: what each phase of a recovery does here, and what training calls meanwhile.

docs/porting.md goes through this file from top to bottom.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from checkpoint import newest, write_common, write_shard
from sharded_adam import every_tensor

from mindio_tft_patch.adaptors.porting import (
    Activity,
    CommitState,
    Marks,
    Outcome,
    Plan,
    Protection,
    RecoveryError,
    ReplicaSet,
    StepGate,
    Strategy,
    check_copies,
    digest_of,
    holders,
    inject_faults,
    parts,
    receive_object,
    receive_optimizer,
    send_object,
    send_optimizer,
    source_of,
    transfers,
    write_together,
)

if TYPE_CHECKING:
    from train import Trainer

SHARD = "dense"  # the name of this trainer's only kind of replica set


class Tolerance:
    """Handlers of the tiny trainer (mindio_tft_patch.processor.handlers.Handlers).

    Attributes:
        record: everything of the last completed step that is neither parameter nor optimizer state.
        resumed: training goes on after a recovery: the end of the last step may be missing.
    """

    def __init__(self, options: Namespace) -> None:
        self.options = options
        self.protection = Protection(packages=("megatron", "sharded_adam", "train"))
        self.board = self.protection.board
        self.rank = self.protection.config.rank
        self.gate = StepGate(self.board, barrier=self.protection.barrier, record=self._completed)
        self.marks = Marks()
        self.record: dict[str, Any] = {}
        self.resumed = False

    # Point 1: start.

    def begin(self) -> None:
        """Before torch.distributed."""
        self.protection.start(self)
        self.marks.open(self.protection.run_folder, self.rank, returning=self.protection.returning)

    def ready(self, trainer: Trainer) -> None:
        """Before the first step."""
        self.trainer = trainer
        self.record = trainer.state()
        self.protection.ready(trainer.step)
        inject_faults(self.protection, self.gate, model=[trainer.model], optimizer=trainer.optimizer)

    # Point 2: report of the optimizer state. The gate makes the marks; this belongs to the last of them.

    def _completed(self, step: int, result: object) -> None:
        self.record = self.trainer.state()

    def commit_state(self) -> CommitState:
        """How far the optimizer state of this rank is."""
        return self.board.commit

    # Points 3 and 4: two copies of the optimizer state, each sharded over one half of the data-parallel group.

    def shard_group(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """The half that this rank's optimizer is sharded over; without protection the whole group."""
        ranks = dist.get_process_group_ranks(group)
        copies = self.protection.config.copies if self.protection.active else 1
        mine = next(part for part in parts(ranks, copies) if self.rank in part)
        self.holders = holders(ranks, copies, self.rank)
        return dist.new_group(mine, use_local_synchronization=True)

    def replica_sets(self) -> tuple[ReplicaSet, ...]:
        """Who holds the same shard as this rank."""
        return (ReplicaSet(SHARD, self.holders),)

    # Point 5: what the exceptions of training lead to is decided elsewhere, within what is offered here.

    def strategies(self) -> tuple[Strategy, ...]:
        """Everything that the user's flags ask for: all of it is implemented below."""
        return self.protection.offered()

    # Points 5 and 12: what this rank is doing, so that a long save is no hang; and the place where it can be held.

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around each step."""
        self.protection.boundary(self.trainer.step)
        with self.board.doing(Activity.COMPUTE):
            self.board.moment("loader")  # for drills: nobody else knows that `Batches` is the data
            yield

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around each periodic checkpoint."""
        with self.board.doing(Activity.SAVE):
            self.board.moment("save")
            yield
            self.board.moment("save_end")

    def pause(self, plan: Plan) -> Outcome:
        """Between two steps: nothing is under way on the device."""
        self.protection.device.synchronize()
        return Outcome()

    # Point 6: clean-up of resources.

    def stop(self) -> None:
        """On the control thread."""
        self.protection.device.stop()

    def arrived(self) -> None:
        """On the main thread, which has left training because of it."""
        self.protection.device.flag.acknowledge()

    def clean(self, plan: Plan) -> Outcome:
        """This rank alone: to the target step, if it waits at its gate."""
        self.protection.device.clean()
        self.gate.settle(plan, self.rank)
        self.protection.device.synchronize()
        return Outcome()

    # Point 7: dying-gasp checkpoint.

    def dump(self, plan: Plan) -> Outcome:
        """The survivors: a checkpoint of the target step."""
        self._check_step(plan, "dump")
        return write_together(plan, self.protection, self.options.save, lambda folder: self._write(plan, folder))

    def _write(self, plan: Plan, folder: Path) -> Iterator[Path]:
        if source_of(plan, self.rank, SHARD) != self.rank:
            return  # another holder of the same shard writes it
        trainer, optimizer = self.trainer, self.trainer.optimizer
        yield write_shard(folder, trainer.tensor_rank, optimizer.position, optimizer.size, optimizer.state())
        if optimizer.position == 0:
            yield write_common(folder, trainer.tensor_rank, self.record)

    # Points 8 and 9: memory after an error of it; communication.

    def rebuild(self, plan: Plan) -> Outcome:
        """All ranks, those that have come back included: connect again."""
        if plan.strategy is Strategy.RELOAD and not newest(self.options.save):
            raise RecoveryError("rebuild", "there is no checkpoint to which all could go back")
        if self.rank in plan.faulty and not self.protection.returning:
            self.protection.renew([*every_tensor(self.trainer.optimizer), *self._gradients()])
        return self.protection.reconnect(plan)

    def _gradients(self) -> Iterator[torch.Tensor]:
        yield from (parameter.main_grad for parameter in self.trainer.optimizer.parameters)

    # Point 10: online repair.

    def repair(self, plan: Plan) -> Outcome:
        """Faulty ranks get their state from a holder of the same shard; then all are compared."""
        optimizer, moved = self.trainer.optimizer, 0
        for source, target in transfers(plan, SHARD):
            if self.rank == source:
                send_object(self.record, target)
                moved += send_optimizer(optimizer.optimizer, target)
            elif self.rank == target:
                self.record = receive_object(source)
                moved += receive_optimizer(optimizer.optimizer, source)
        # On all ranks: the fault may have come between an update and this, which belongs to it.
        optimizer.gather()
        check_copies(plan, {SHARD: digest_of(self._named_tensors())})
        return Outcome(bytes_moved=moved)

    def _named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from sorted(self.trainer.optimizer.state().items())
        yield from self.trainer.model.named_parameters()

    # Point 11: rollback.

    def rollback(self, plan: Plan) -> Outcome:
        """Counters, data, random numbers at the target step; or all of the last checkpoint."""
        if plan.strategy is Strategy.RELOAD:
            self.trainer.load()
            self.record = self.trainer.state()
        else:
            self._check_step(plan, "rollback")
            self.trainer.load_state(self.record)
        self.board.set_commit(CommitState(step=self.trainer.step))
        return Outcome()

    def _check_step(self, plan: Plan, phase: str) -> None:
        if self.record["step"] != plan.target_step:
            raise RecoveryError(phase, f"this rank is at step {self.record['step']}, not at {plan.target_step}")

    def resume(self, plan: Plan) -> Outcome:
        """train() is called next."""
        self.resumed = True
        return Outcome()

    def logs(self, step: int) -> bool:
        """Is the log line of a step still to be written?"""
        return not self.resumed or self.marks.logged < step

    def saves(self, step: int) -> bool:
        """Is the checkpoint of a step still to be written? The same on all ranks."""
        return not self.resumed or newest(self.options.save) != step
