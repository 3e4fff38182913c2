"""What the optimizer costs in memory, by formula and by measurement.

Bytes of a parameter on one rank, with N copies in a data-parallel group of size d (Adam, 16-bit parameters):

    4 + 16 N/d    16-bit gradients: parameter 2, gradient 2; sharded: main parameter 4, main gradient 4, moments 4 + 4
    6 + 12 N/d    fp32 gradients:   parameter 2, gradient 4; sharded: main parameter 4, moments 4 + 4
    8 +  8 N/d    fp32 parameters:  parameter 4, gradient 4; sharded: moments 4 + 4

Megatron pads its buffers, and the shards are cuts of the padded buffers. So the formula is exact for a rank when it is
given the padded number of elements; the elements of the rank's shard that are padding have no optimizer state.
Scalars (the step of each parameter) are left out on both sides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

_MOMENTS = 8  # exp_avg and exp_avg_sq in fp32
_MAIN = 4


@dataclass(frozen=True)
class OptimizerBytes:
    """Memory of one rank. numel: padded elements of its buffers. padding: padded elements in its shard.

    held: bytes of buffers and sharded state. state_bytes: bytes of sharded state for one element.
    """

    numel: int
    padding: int
    held: int
    state_bytes: int

    @property
    def with_padding(self) -> int:
        """What would be held if padding had optimizer state; equals the formula exactly."""
        return self.held + self.padding * self.state_bytes


def whole_bytes(param: torch.dtype, grad: torch.dtype) -> int:
    """Bytes of a parameter that every rank holds."""
    return int(param.itemsize) + int(grad.itemsize)


def sharded_bytes(param: torch.dtype, grad: torch.dtype) -> int:
    """Bytes of a parameter that are divided by d/N."""
    if param.itemsize == 4:
        return _MOMENTS  # the main parameter and the main gradient are views of the buffers
    return _MOMENTS + _MAIN + (_MAIN if grad.itemsize < 4 else 0)


def expected_bytes(numel: int, param: torch.dtype, grad: torch.dtype, *, group_size: int, copies: int) -> int:
    """Bytes of one rank by the formula.

    numel: padded elements of the buffer. group_size: d, data- and context-parallel. copies: N.
    """
    return whole_bytes(param, grad) * numel + sharded_bytes(param, grad) * (numel * copies // group_size)


def distributed_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers that shard their state, unchained."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [one for one in chained if hasattr(one, "shard_fp32_from_float16_groups") and hasattr(one, "buffers")]


def expected_of(optimizer: Any, group_size: int, copies: int) -> int:
    """Bytes by the formula for the buffers of one distributed optimizer."""
    return sum(
        expected_bytes(numel, param, grad, group_size=group_size, copies=copies)
        for numel, param, grad in buffers(optimizer)
    )


def buffers(optimizer: Any) -> Iterator[tuple[int, torch.dtype, torch.dtype]]:
    """Yield padded elements and dtypes of each buffer."""
    for buffer in optimizer.buffers:
        yield buffer.grad_data.numel(), buffer.param_dtype, buffer.grad_dtype


def measure(optimizer: Any) -> OptimizerBytes:
    """Count what a distributed optimizer really holds, after its first step.

    Main gradients of 16-bit gradients exist only between prepare_grads and zero_grad; they are counted as present.
    """
    held = numel = slots = local = 0
    state_bytes = 0
    part = optimizer.data_parallel_group.size()
    for buffer in optimizer.buffers:
        tensors = [buffer.grad_data] + ([buffer.param_data] if buffer.param_data is not None else [])
        held += _storage(tensors)
        if buffer.param_data is None:  # parameters outside the buffer: no distributed optimizer
            held += sum(param.numel() * param.element_size() for param in buffer.params)
        numel += buffer.grad_data.numel()
        slots += buffer.grad_data.numel() // part
        state_bytes = sharded_bytes(buffer.param_dtype, buffer.grad_dtype)
        held_grads = 4 if state_bytes == _MOMENTS + 2 * _MAIN else 0
    mains = [param for group in optimizer.shard_fp32_from_float16_groups for param in group if param is not None]
    views = [param for group in optimizer.shard_fp32_groups for param in group if param is not None]
    held += sum(param.numel() * param.element_size() for param in mains)
    held += held_grads * sum(param.numel() for param in mains)
    for state in optimizer.optimizer.state.values():
        held += sum(value.numel() * value.element_size() for value in state.values() if _is_moment(value))
    local = sum(param.numel() for param in [*mains, *views])
    return OptimizerBytes(numel, slots - local, held, state_bytes)


def _is_moment(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _storage(tensors: Iterable[torch.Tensor]) -> int:
    return sum({tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}.values())
