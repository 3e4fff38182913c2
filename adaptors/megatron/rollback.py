"""Phase rollback: bring everything that is not optimizer state to the target step (adaptation point 11).

Counters, scheduler, loss scaler, generators, buffers: train_state.py. Data iterators: data_source.py. Sums of the
training log: log_state.py. Whether the end of the step (its log line, evaluation, save) has to be repeated is agreed
here by all ranks; iteration_end.py does it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from mindio_tft_patch.adaptors.megatron import moe_statistics
from mindio_tft_patch.adaptors.megatron.data_source import DataSource
from mindio_tft_patch.adaptors.megatron.iteration_end import EndOfStep, IterationEnd
from mindio_tft_patch.adaptors.megatron.log_state import LogPosition, LogState
from mindio_tft_patch.adaptors.megatron.train_state import StepRecord, TrainState, evaluation_follows
from mindio_tft_patch.adaptors.porting.marks import Marks
from mindio_tft_patch.errors import RecoveryError
from mindio_tft_patch.protocol.messages import Plan

log = logging.getLogger("mindio_tft_patch.rollback")

NOT_PLACEABLE = (
    "the training data cannot be read again from a given sample on: its loader is not Megatron's own "
    "(--dataloader-type external)"
)


@dataclass(frozen=True)
class Place:
    """Where training goes on.

    end: the end of `step` that is repeated first; None when all ranks had come to the next step.
    """

    step: int
    end: EndOfStep | None


def rollback(
    plan: Plan,
    *,
    args: Any,
    state: TrainState,
    data: DataSource,
    log_state: LogState,
    position: LogPosition | None,
    marks: Marks,
    ending: IterationEnd,
    returning: bool,
) -> Place:
    """Carry out the phase on this rank.

    Args:
        position: where the log of this rank's partner stands, when its state came from there.
        returning: this process has taken the place of a lost one.

    Raises:
        RecoveryError: this rank is not at the target step, or its data cannot be brought there.
    """
    record = state.record
    if record.step != plan.target_step:
        raise RecoveryError("rollback", f"this rank is at step {record.step}, not at {plan.target_step}")
    if returning and not data.can_place_training:
        raise RecoveryError("rollback", NOT_PLACEABLE)
    end = _agree(args, record, data, marks)
    state.restore(repeat_end=end is not None)
    if returning:
        data.train_from(first_sample(args, record.step, record.consumed_train_samples), record.step)
    else:
        data.rewind_to(record.step)
    _place_validation(args, record, data, end, returning=returning)
    # Last: a loader draws from torch's generator when it begins to be read.
    state.restore_generators(repeat_end=end is not None)
    log_state.reenter(record.step, position, repeat_end=end is not None)
    facts = record.facts.get(dist.get_rank())
    moe_statistics.put_back(facts.statistics if end is not None and facts is not None else {})
    ending.forget()
    if end is not None:
        ending.repeat(end)
    return Place(record.step, end)


def _agree(args: Any, record: StepRecord, data: DataSource, marks: Marks) -> EndOfStep | None:
    """What of the end of the step is missing; the same answer on every rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    own = {**marks.values(), "made": record.before is not None, "valid": data.can_place_validation}
    dist.all_gather_object(everyone, own)
    step = record.step
    if not all(one["made"] for one in everyone) or all(one["begun"] > step for one in everyone):
        return None
    facts = record.facts.get(dist.get_rank())
    due = evaluation_follows(args, step)
    evaluated = everyone[-1]["evaluated"] >= step or not all(one["valid"] for one in everyone)
    if due and evaluated and everyone[-1]["evaluated"] < step:
        log.warning("the evaluation after step %d is left out: its data cannot be read again", step)
    return EndOfStep(
        step=step,
        losses=None if facts is None else facts.losses,
        result=record.result,
        logged=everyone[-1]["logged"] >= step,  # the last rank is the one that prints
        evaluated=due and evaluated,
        saved=any(one["saved"] >= step for one in everyone),  # a save returns when all have written
    )


def _place_validation(
    args: Any, record: StepRecord, data: DataSource, end: EndOfStep | None, *, returning: bool
) -> None:
    due = end is not None and evaluation_follows(args, record.step)
    before = record.before.consumed_valid_samples if record.before is not None else record.consumed_valid_samples
    again = due and end is not None and not end.evaluated
    consumed = before if again else record.consumed_valid_samples
    args.consumed_valid_samples = consumed
    if due or returning:
        data.valid_from(consumed)


def first_sample(args: Any, step: int, consumed: int) -> int:
    """Samples that the training loader has given out: those of the current phase of the data."""
    transitions = getattr(args, "phase_transition_iterations", None)
    if not transitions:
        return consumed
    last = max(one for one in (0, *transitions) if one <= step)
    return int((step - last) * args.global_batch_size)
