"""Recovery in place on the Megatron-LM of 2023: what of adaptors.megatron.in_place is different there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from mindio_tft_patch.adaptors.device.unconnected import Unconnected
from mindio_tft_patch.adaptors.megatron.gate import CommitGate
from mindio_tft_patch.adaptors.megatron.in_place import InPlace
from mindio_tft_patch.adaptors.megatron.iteration_end import IterationEnd
from mindio_tft_patch.adaptors.megatron.log_state import LogState
from mindio_tft_patch.adaptors.megatron.training_objects import Training
from mindio_tft_patch.adaptors.megatron_legacy.data import replaceable
from mindio_tft_patch.config import Config
from mindio_tft_patch.processor.handlers import Outcome
from mindio_tft_patch.processor.progress import ProgressBoard
from mindio_tft_patch.protocol.messages import Plan


class LegacyIterationEnd(IterationEnd):
    """Notes the losses of a step as this Megatron averages them: one micro-batch after the other."""

    def around_get_forward_backward(
        self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Wrapper of get_forward_backward_func."""
        compute = super().around_get_forward_backward(wrapped, instance, args, kwargs)

        def forward_backward(*inner: Any, **named: Any) -> Any:
            losses = compute(*inner, **named)
            if losses and not named.get("forward_only", True) and self.losses is losses:
                self.losses = [{name: sum(one[name] for one in losses) / len(losses) for name in losses[0]}]
            return losses

        return forward_backward


class LegacyInPlace(InPlace):
    """Recovery in place of one rank."""

    def __init__(
        self,
        config: Config,
        board: ProgressBoard,
        gate: CommitGate,
        log_state: LogState,
        unconnected: Unconnected,
    ) -> None:
        super().__init__(config, board, gate, log_state, unconnected)
        self.ending = LegacyIterationEnd(gate)

    def around_build_iterators(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wrapper of build_train_valid_test_data_iterators."""
        return replaceable(super().around_build_iterators(wrapped, instance, args, kwargs))

    def around_load_checkpoint(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wrapper of load_checkpoint: a process that has come back gets its state from a partner instead."""
        return 0 if self._unconnected.active else wrapped(*args, **kwargs)

    def around_index(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wrapper of what builds a dataset's index: it adds up ones over groups, and insists on the sum."""
        if not self._unconnected.active:
            return wrapped(*args, **kwargs)
        with _sums_of_equals():
            return wrapped(*args, **kwargs)

    def resume(self, plan: Plan, training: Training) -> Outcome:
        """Phase resume."""
        outcome = super().resume(plan, training)
        # Its zero_grad() looks only at parameters that this rank updates a piece of.
        for chunk in training.model:
            for parameter in chunk.parameters():
                parameter.grad = None
        return outcome


@contextmanager
def _sums_of_equals() -> Iterator[None]:
    """Answer an all-reduce as if every rank of the group had the same value."""
    before = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **_: Any) -> None:
        if op == dist.ReduceOp.SUM:
            tensor.mul_(dist.get_world_size(group))

    dist.all_reduce = all_reduce
    try:
        yield
    finally:
        dist.all_reduce = before
