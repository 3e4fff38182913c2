"""Everything of a step that is not model or optimizer state, and how it comes back (adaptation point 11).

A `StepRecord` is taken at the commit of each step: what a checkpoint of that step, written by Megatron after the
iteration, would contain. Megatron advances the scheduler and the sample counters only after the optimizer, so the
record holds the values *after* they have been advanced; `restore` then works at any moment around the commit.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Counters:
    """What Megatron's training loop counts on after the update; here as it was before the step."""

    consumed_train_samples: int
    skipped_train_samples: int
    consumed_valid_samples: int
    scheduler_steps: int
    floating_point_operations: float


@dataclass(frozen=True)
class StepRecord:
    """State of one completed step.

    step: number of completed iterations.
    before: the counters at the beginning of the step; None when this process has not made it.
    rng_at_commit: generator states right after the update; `rng` goes on to the beginning of the next step.
    facts: what each holder of this rank's shard has computed in the step (step_exchange.py), by rank.
    result: what optimizer.step() returns: successful, gradient norm, zeros.
    scheduler_steps: samples seen by the learning-rate scheduler.
    scalers: state of each optimizer's loss scaler, in the order of the chain; None where there is none.
    rng: generator states by name.
    buffers: persistent model buffers that are not parameters (router biases and the like), by chunk and name.
    floating_point_operations: Megatron's running total.
    """

    step: int
    consumed_train_samples: int
    skipped_train_samples: int
    consumed_valid_samples: int
    scheduler_steps: int
    scalers: tuple[Any, ...] = ()
    rng: dict[str, Any] = field(default_factory=dict)
    buffers: tuple[dict[str, torch.Tensor], ...] = ()
    floating_point_operations: float = 0.0
    before: Counters | None = None
    rng_at_commit: dict[str, Any] = field(default_factory=dict)
    facts: dict[int, Any] = field(default_factory=dict)
    result: tuple[Any, ...] = ()


_SMALL_BUFFER = 4096  # numbers; larger ones that no checkpoint holds are tables that never change


def leaf_optimizers(optimizer: Any) -> list[Any]:
    """The optimizers of a chain, or the optimizer itself."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is None:
        return [optimizer]
    return [leaf for inner in chained for leaf in leaf_optimizers(inner)]


def rng_states() -> dict[str, Any]:
    """States of the generators that Megatron saves: python, numpy, torch, device, model-parallel tracker."""
    from megatron.core import tensor_parallel

    tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": {name: state.clone() if hasattr(state, "clone") else state for name, state in tracker.items()},
    }


def set_rng_states(states: dict[str, Any]) -> None:
    """Put the generators back to `rng_states()`."""
    from megatron.core import tensor_parallel

    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    torch.cuda.set_rng_state(states["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(dict(states["tracker"]))


class ModelBuffers:
    """The buffers of model chunks that are no parameters; for most models there are none that change.

    Those that a checkpoint holds (router biases and the like), and small ones that it does not hold: some count what a
    step has seen so far. Which modules have buffers is looked up once: the walk over all modules is too slow for every
    step.
    """

    def __init__(self, model: list[torch.nn.Module]) -> None:
        self._owners = [
            [(prefix, module) for prefix, module in chunk.named_modules() if module._buffers] for chunk in model
        ]

    def copies(self) -> tuple[dict[str, torch.Tensor], ...]:
        """A copy of each, by chunk and name."""
        return tuple({name: buffer.detach().clone() for name, buffer in self._of(chunk)} for chunk in self._owners)

    def restore(self, copies: tuple[dict[str, torch.Tensor], ...]) -> None:
        """Put `copies()` back."""
        for chunk, saved in zip(self._owners, copies, strict=True):
            for name, buffer in self._of(chunk):
                if name in saved:  # else it was made since
                    buffer.data.copy_(saved[name])

    @staticmethod
    def _of(owners: list[tuple[str, torch.nn.Module]]) -> Iterable[tuple[str, torch.Tensor]]:
        for prefix, module in owners:
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                if name not in module._non_persistent_buffers_set or buffer.numel() <= _SMALL_BUFFER:
                    yield f"{prefix}.{name}", buffer


def samples_per_iteration(args: Any) -> int:
    """Samples of the current iteration over all data-parallel ranks."""
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    return int(parallel_state.get_data_parallel_world_size() * args.micro_batch_size * get_num_microbatches())


def _skipped_samples() -> int:
    from megatron.core import num_microbatches_calculator as calculator

    return int(calculator.get_current_global_batch_size() - calculator.get_current_running_global_batch_size())


def evaluation_samples(args: Any) -> int:
    """Samples that one evaluation uses."""
    iterations = args.eval_iters
    if isinstance(iterations, (list, tuple)):
        iterations = sum(iterations)
    batch = getattr(args, "eval_global_batch_size", None) or args.global_batch_size
    return int((iterations or 0) * batch)


def evaluation_follows(args: Any, step: int) -> bool:
    """Does Megatron evaluate between this step and the next? As its train() decides."""
    first = getattr(args, "start_eval_at_iter", None)
    return bool(
        args.eval_interval and step % args.eval_interval == 0 and args.do_valid and (first is None or step >= first)
    )


def _scaler_states(optimizer: Any) -> tuple[Any, ...]:
    scalers = (getattr(leaf, "grad_scaler", None) for leaf in leaf_optimizers(optimizer))
    return tuple(None if scaler is None else copy.deepcopy(scaler.state_dict()) for scaler in scalers)


def settle_rerun_machine(step: int) -> None:
    """Put Megatron's rerun machine between two steps, of which `step` is the last completed one.

    A fault inside a forward-backward pass leaves it in the middle of that pass. It is part of a checkpoint, and a job
    that loaded it like that would take its first pass for done.
    """
    from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine

    machine = get_rerun_state_machine()
    machine.state = RerunState.NOT_RUNNING_YET
    machine.current_iteration = step
    machine.data_iterator_checkpoints = None
    machine.rerun_requested = machine.checkpoint_requested = False
    machine.restart_again_requested = machine.continue_requested = False


class TrainState:
    """Keeps the record of the last completed step of one rank.

    Args:
        args: Megatron's global arguments.
        model: model chunks.
        optimizer: Megatron optimizer (chained or not).
        scheduler: Megatron's OptimizerParamScheduler.
        iteration: completed iterations at the start of train().
    """

    def __init__(self, args: Any, model: list[Any], optimizer: Any, scheduler: Any, iteration: int) -> None:
        self._args = args
        self._buffers = ModelBuffers(model)
        self._optimizer = optimizer
        self._scheduler = scheduler
        self.record = StepRecord(
            step=iteration,
            consumed_train_samples=args.consumed_train_samples,
            skipped_train_samples=args.skipped_train_samples,
            consumed_valid_samples=args.consumed_valid_samples,
            scheduler_steps=scheduler.num_steps,
            scalers=_scaler_states(optimizer),
            rng=rng_states(),
            buffers=self._buffers.copies(),
            floating_point_operations=getattr(args, "num_floating_point_operations_so_far", 0),
        )
        self.facts: dict[int, Any] = {}  # of the step under way
        self.result: tuple[Any, ...] = ()  # likewise

    def commit(self, step: int, skipped: bool) -> None:
        """Record the step whose local update has just been completed (or skipped)."""
        from megatron.training import training

        args, last = self._args, self.record
        samples = samples_per_iteration(args)
        operations = training.num_floating_point_operations(args, samples)
        # An evaluation that is due belongs to the step: a restart begins with the next step and does not catch up on
        # it. Counted now, because when the fault comes some ranks are in it already and others are not.
        evaluated = evaluation_samples(args) if evaluation_follows(args, step) else 0
        before = Counters(
            consumed_train_samples=args.consumed_train_samples,
            skipped_train_samples=args.skipped_train_samples,
            consumed_valid_samples=args.consumed_valid_samples,
            scheduler_steps=self._scheduler.num_steps,
            floating_point_operations=last.floating_point_operations,
        )
        states = rng_states()
        self.record = StepRecord(
            step=step,
            consumed_train_samples=args.consumed_train_samples + samples,
            skipped_train_samples=args.skipped_train_samples + _skipped_samples(),
            consumed_valid_samples=args.consumed_valid_samples + evaluated,
            scheduler_steps=self._scheduler.num_steps + (0 if skipped else samples),
            scalers=_scaler_states(self._optimizer),
            rng=states,
            buffers=self._buffers.copies(),
            floating_point_operations=last.floating_point_operations + operations,
            before=before,
            rng_at_commit=states,
            facts=self.facts,
            result=self.result,
        )

    def before_step(self) -> None:
        """Take what logging, evaluation and saving have changed since the commit into the record."""
        self.record = replace(self.record, rng=rng_states(), consumed_valid_samples=self._args.consumed_valid_samples)

    def evaluation_counts(self, consumed_valid_samples: int) -> None:
        """An evaluation ended, or was interrupted and counts as done: its samples are not used again."""
        self.record = replace(self.record, consumed_valid_samples=consumed_valid_samples)

    def restore(self, *, repeat_end: bool = False) -> StepRecord:
        """Bring scheduler, counters, scaler, generators and buffers to the last completed step.

        Args:
            repeat_end: to the moment right after its update, before the training loop has counted the step.
        """
        record, args = self.record, self._args
        at: Any = record.before if repeat_end else record
        assert at is not None, "this process has not made the step"
        args.consumed_train_samples = at.consumed_train_samples
        args.skipped_train_samples = at.skipped_train_samples
        args.consumed_valid_samples = at.consumed_valid_samples
        args.num_floating_point_operations_so_far = at.floating_point_operations
        self._scheduler.num_steps = at.scheduler_steps
        self._scheduler.step(increment=0)  # sets learning rate and weight decay of every parameter group
        for leaf, state in zip(leaf_optimizers(self._optimizer), record.scalers, strict=True):
            if state is not None:
                leaf.grad_scaler.load_state_dict(copy.deepcopy(state))
        self._buffers.restore(record.buffers)
        settle_rerun_machine(record.step - repeat_end)
        self.restore_generators(repeat_end=repeat_end)
        return record

    def restore_generators(self, *, repeat_end: bool = False) -> None:
        """Only the generators: once more after what may have drawn from them."""
        set_rng_states(self.record.rng_at_commit if repeat_end else self.record.rng)
