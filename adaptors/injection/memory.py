"""Memory errors that are real: tensors of one class are overwritten, then what torch_npu raises is raised.

    memory_parameters        what the forward pass uses
    memory_main_parameters   what the optimizer updates (this rank's shard)
    memory_moments           its state
    memory_gradients         gradient buffers, and gradients of the main parameters
    memory_activations       outputs of modules, in the forward pass that follows
    memory_ecc               a time-stamped multi-bit error: in an update main parameters and moments, else gradients
    bit_flip                 one bit of the optimizer state changes, and nobody is told

Overwritten with NaN, which no arithmetic hides: a tensor that a repair forgot shows in the next loss. Where there is
nothing to overwrite the fault does not happen, and the log says so: a repair of nothing would prove nothing. Only
before the first step, when an optimizer has no state yet, the error comes alone.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch

from mindio_tft_patch.adaptors.megatron.train_state import leaf_optimizers
from mindio_tft_patch.fault_injection import Act, NotInjectedError, PlannedFault
from mindio_tft_patch.processor.progress import ProgressBoard
from mindio_tft_patch.protocol.phases import Activity

log = logging.getLogger("mindio_tft_patch.injection")

Source = Callable[[Any], Iterable[torch.Tensor]]

_ACTIVATIONS = 3  # outputs that are overwritten before the error is noticed


def parameters(training: Any) -> Iterator[torch.Tensor]:
    """Parameters of the model."""
    for chunk in training.model:
        yield from chunk.parameters()


def main_parameters(training: Any) -> Iterator[torch.Tensor]:
    """What the optimizers update; without main parameters the model's own."""
    for optimizer in _inner_optimizers(training):
        for group in optimizer.param_groups:
            yield from group["params"]


def moments(training: Any) -> Iterator[torch.Tensor]:
    """Optimizer state that belongs to single numbers of parameters; before the first step there may be none."""
    for optimizer in _inner_optimizers(training):
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.dim() > 0)


def gradients(training: Any) -> Iterator[torch.Tensor]:
    """Gradients of model and main parameters, and the buffers that Megatron reduces."""
    for chunk in training.model:
        for buffer in _buffers(chunk):
            yield buffer.grad_data
    for parameter in (*parameters(training), *main_parameters(training)):
        for name in ("main_grad", "grad"):
            gradient = getattr(parameter, name, None)
            if isinstance(gradient, torch.Tensor):
                yield gradient


def _buffers(chunk: Any) -> list[Any]:
    """Gradient buffers of Megatron's DistributedDataParallel; `buffers` is a method of every other module."""
    dense = getattr(chunk, "buffers", None)
    experts = getattr(chunk, "expert_parallel_buffers", None)
    return [*(dense if isinstance(dense, list) else ()), *(experts if isinstance(experts, list) else ())]


def _inner_optimizers(training: Any) -> Iterator[Any]:
    """Torch optimizers: the one that was handed over, or those that it wraps."""
    for leaf in leaf_optimizers(training.optimizer):
        inner = getattr(leaf, "optimizer", leaf if isinstance(leaf, torch.optim.Optimizer) else None)
        if inner is not None:  # a rank without parameters of its own has a stub
            yield inner


def _before_the_first_step(training: Any) -> bool:
    """There are optimizers, and none has a state yet."""
    optimizers = list(_inner_optimizers(training))
    return bool(optimizers) and not any(one.state for one in optimizers)


def overwrite(tensors: Iterable[torch.Tensor]) -> int:
    """Fill tensors with NaN; how many they were."""
    count = 0
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.numel():
            tensor.data.fill_(float("nan"))
            count += 1
    return count


def raise_uncorrectable(rank: int) -> NoReturn:
    """What torch_npu raises for ACL_ERROR_RT_DEVICE_MEM_ERROR (507053); source: NPUException.h, NPU_CHECK_ERROR."""
    raise RuntimeError(f"UCE ERROR{_error_code(rank)}")


def raise_multi_bit(rank: int, now_microseconds: int) -> NoReturn:
    """What torch_npu raises for ACL_ERROR_RT_HBM_MULTI_BIT_ECC_ERROR (507054); source: handleHbmMultiBitEccError.

    now_microseconds: of the device's clock, which counts from its start.
    """
    raise RuntimeError(
        "HBM MULTI BIT ECC ERROR.HBM MULTI BIT ECC, Uncorrectable ECC, device_id=0, event_id=0x80e01801, "
        f"time us= {now_microseconds}.[FUNC:ProcHBMRas][FILE:stars_engine.cc]time is {now_microseconds}"
        f"{_error_code(rank)}"
    )


def _error_code(rank: int) -> str:
    stamp = time.strftime("%Y-%m-%d-%H:%M:%S")
    return f"\n[ERROR] {stamp} (PID:{os.getpid()}, Device:0, RankID:{rank}) ERR00100 PTA call acl api failed"


def kinds(training: Callable[[], Any], board: ProgressBoard, rank: int) -> dict[str, Act]:
    """What a schedule can do to the tensors of this rank.

    training: the objects of the running train(), with `model` and `optimizer`; None before it.
    """

    def corrupt(fault: PlannedFault, *sources: Source) -> None:
        running = training()
        count = 0 if running is None else sum(overwrite(source(running)) for source in sources)
        if running is not None and not count and not (moments in sources and _before_the_first_step(running)):
            raise NotInjectedError(_nothing(fault))
        log.warning("%d tensor(s) were overwritten on purpose", count, extra={"fields": {"overwritten": count}})

    def plain(source: Source) -> Act:
        def act(fault: PlannedFault) -> None:
            corrupt(fault, source)
            raise_uncorrectable(rank)

        return act

    def ecc(fault: PlannedFault) -> None:
        if board.activity is Activity.UPDATE:
            corrupt(fault, main_parameters, moments)
        else:
            corrupt(fault, gradients)
        raise_multi_bit(rank, time.monotonic_ns() // 1000)

    def activations(fault: PlannedFault) -> None:
        running = training()
        if running is None:
            raise_uncorrectable(rank)
        _corrupt_next_forward(running.model, rank)

    def flip(fault: PlannedFault) -> None:
        running = training()
        first = next(iter(moments(running)), None) if running is not None else None
        if first is None:
            raise NotInjectedError(_nothing(fault))
        first.data.view(-1).view(torch.uint8)[0] ^= 1
        log.warning("one bit of the optimizer state was flipped on purpose")

    return {
        "bit_flip": flip,
        "memory_parameters": plain(parameters),
        "memory_main_parameters": plain(main_parameters),
        "memory_moments": plain(moments),
        "memory_gradients": plain(gradients),
        "memory_activations": activations,
        "memory_ecc": ecc,
    }


def _nothing(fault: PlannedFault) -> str:
    return (
        f"{fault.kind} finds no tensor at this moment (the optimizer that was handed over has to be a torch optimizer, "
        "or to have it as its attribute `optimizer`)"
    )


def _corrupt_next_forward(model: list[Any], rank: int) -> None:
    """Overwrite what modules of the next forward pass hand on; the error is raised at the third of them."""
    hooks: list[Any] = []
    overwritten: list[str] = []

    def hook(module: Any, inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if not isinstance(first, torch.Tensor) or not overwrite([first]):
            return
        overwritten.append(type(module).__name__)
        if len(overwritten) < _ACTIVATIONS:
            return
        for one in hooks:
            one.remove()
        log.warning("outputs of %s were overwritten on purpose", ", ".join(overwritten))
        raise_uncorrectable(rank)

    for chunk in model:
        hooks += [module.register_forward_hook(hook) for module in chunk.modules()]
