"""Phase repair: fill the state of faulty ranks from healthy replicas, and prove that it is the same (point 10).

transfer      optimizer state and main parameters of each shard, from the rank that speaks for it
companions    record of the step, scheduler, log sums, frozen parameters, generators, from the same ranks
parameters    on all ranks: the model's parameters from the main parameters, by Megatron's own all-gather, because a
              fault may have come before or during the one that follows an update
verify        holders of a shard compare digests of everything
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from mindio_tft_patch.adaptors.megatron.bucket_groups import drop_handles
from mindio_tft_patch.adaptors.megatron.digest import shard_digests
from mindio_tft_patch.adaptors.megatron.log_state import LogPosition, LogState
from mindio_tft_patch.adaptors.megatron.shard_state import parameters_of, receive_state, send_state
from mindio_tft_patch.adaptors.megatron.train_state import StepRecord, TrainState, leaf_optimizers
from mindio_tft_patch.adaptors.porting.copies import check_copies, source_of
from mindio_tft_patch.adaptors.porting.transfer import (
    receive_object,
    receive_tensors,
    send_object,
    send_tensors,
)
from mindio_tft_patch.errors import RecoveryError
from mindio_tft_patch.processor.handlers import Outcome
from mindio_tft_patch.protocol.messages import Plan

log = logging.getLogger("mindio_tft_patch.repair")

DENSE, EXPERT = "dense", "expert"
_EXPERT_GENERATOR = "expert-parallel-rng"


@dataclass(frozen=True)
class Companions:
    """What belongs to the state of a rank beside tensors; the same on all holders of a dense shard."""

    record: StepRecord
    scheduler: dict[str, Any]
    log: LogPosition

    @classmethod
    def of(cls, scheduler: Any, state: TrainState, log_state: LogState) -> Companions:
        """Those of this rank."""
        plain = {
            name: value
            for name, value in vars(scheduler).items()
            if value is None or isinstance(value, (bool, int, float, str))
        }
        return cls(state.record, plain, log_state.position())


def repair(
    plan: Plan, *, model: list[Any], optimizer: Any, scheduler: Any, state: TrainState, log_state: LogState
) -> tuple[Outcome, LogPosition | None]:
    """Carry out the phase on this rank.

    Returns:
        What to report; and on a repaired rank where the training log of its partner stands.

    Raises:
        RecoveryError: no source for a shard, or holders of a shard differ afterwards.
    """
    leaves = leaf_optimizers(optimizer)
    kinds = {number: kind_of(leaf) for number, leaf in enumerate(leaves)}
    me, moved, position = dist.get_rank(), 0, None
    for faulty in plan.faulty:
        for kind in (DENSE, EXPERT):
            source = _source(plan, faulty, kind)
            if source is None or me not in (source, faulty):
                continue
            own = [leaf for number, leaf in enumerate(leaves) if kinds[number] == kind]
            if me == source:
                moved += sum(send_state(leaf, faulty) for leaf in own)
                moved += _send_companions(kind, faulty, model, Companions.of(scheduler, state, log_state))
                continue
            moved += sum(receive_state(leaf, source) for leaf in own)
            received, size = _receive_companions(kind, source, model, scheduler, state)
            position, moved = position or received, moved + size
    _refresh_parameters(model, leaves)
    check_copies(plan, shard_digests(optimizer, model, kinds))
    return Outcome(bytes_moved=moved), position


def kind_of(leaf: Any) -> str:
    """Which replica set an optimizer belongs to."""
    buffers = getattr(leaf, "buffers", None)
    if buffers:
        parameters = [parameter for buffer in buffers for parameter in buffer.params]
    else:
        groups = [getattr(leaf, name, None) or [] for name in ("float16_groups", "fp32_from_fp32_groups")]
        parameters = [one for kind in groups for group in kind for one in group] or parameters_of(leaf)
    return DENSE if not parameters or any(getattr(one, "allreduce", True) for one in parameters) else EXPERT


def _source(plan: Plan, faulty: int, kind: str) -> int | None:
    found = source_of(plan, faulty, kind)
    if found is None and kind == DENSE:
        raise RecoveryError("repair", f"the plan has no source for the {kind} shard of rank {faulty}")
    return found


def _frozen(model: list[Any]) -> list[torch.Tensor]:
    """Parameters that no optimizer updates."""
    return [one.data for chunk in model for one in chunk.parameters() if not one.requires_grad]


def _send_companions(kind: str, target: int, model: list[Any], companions: Companions) -> int:
    if kind == EXPERT:
        send_object(_expert_generators(companions.record), target)
        return 0
    send_object(companions, target)
    return send_tensors(_frozen(model), target)


def _receive_companions(
    kind: str, source: int, model: list[Any], scheduler: Any, state: TrainState
) -> tuple[LogPosition | None, int]:
    if kind == EXPERT:
        state.record = _with_generators(state.record, receive_object(source))
        return None, 0
    companions: Companions = receive_object(source)
    state.record = companions.record
    for name, value in companions.scheduler.items():
        setattr(scheduler, name, value)
    return companions.log, receive_tensors(_frozen(model), source)


def _expert_generators(record: StepRecord) -> tuple[Any, Any]:
    states = (record.rng, record.rng_at_commit)
    return states[0].get("tracker", {}).get(_EXPERT_GENERATOR), states[1].get("tracker", {}).get(_EXPERT_GENERATOR)


def _with_generators(record: StepRecord, states: tuple[Any, Any]) -> StepRecord:
    """Expert-parallel ranks draw differently, so this generator comes from the holder of the expert shard."""

    def changed(states_of: dict[str, Any], value: Any) -> dict[str, Any]:
        if value is None or not states_of:
            return states_of
        return {**states_of, "tracker": {**states_of["tracker"], _EXPERT_GENERATOR: value}}

    return replace(record, rng=changed(record.rng, states[0]), rng_at_commit=changed(record.rng_at_commit, states[1]))


def _refresh_parameters(model: list[Any], leaves: list[Any]) -> None:
    with torch.no_grad():
        for leaf in leaves:
            copy_to_model = getattr(leaf, "_copy_main_params_to_model_params", None)
            if copy_to_model is not None and leaf.optimizer is not None:
                copy_to_model()
        for chunk in model:
            if getattr(getattr(chunk, "ddp_config", None), "use_distributed_optimizer", False):
                drop_handles(chunk)  # of a gathering that was cut off
                chunk.start_param_sync(force_sync=True)
