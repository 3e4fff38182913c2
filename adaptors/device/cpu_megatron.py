"""Corrections inside Megatron that the CPU stand-in needs, applied when the module in question is imported.

| module | name | why |
|---|---|---|
| core.datasets.utils | compile_helpers | runs make in Megatron's own folder; see `cpu_helpers.py` |
| core.utils | is_te_min_version | core_v0.12 asks on loading a checkpoint and raises without Transformer Engine |
| core.fp8_utils | _quantize_param_shard_impl | core_v0.12 raises without Transformer Engine, even with nothing to do |
| core.transformer.moe.moe_utils | maybe_move_tensor_to_cpu | turns split sizes into numpy only on the way from CUDA |
| core.tensor_parallel.random | its logger | warns at every dropout that the CPU's generator moved; here it must |
| core.optimizer.distrib_optimizer | DistributedOptimizer | saving and loading torch's Adam; see `cpu_adam.py` |
| core.dist_checkpointing.mapping | numpy.product | core_v0.12 calls it; numpy 2 removed it |
| core.dist_checkpointing.strategies.filesystem_async | _write_item | core_v0.12 omits an argument that torch added |
| legacy.fused_kernels | load | core_v0.12 looks for the CUDA compiler |
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

from mindio_tft_patch.adaptors.device import cpu_adam, cpu_helpers
from mindio_tft_patch.adaptors.device.cpu_registry import Registry

# transforms, stream, data, write_item, storage_key, serialization_format
_ARGUMENTS_WITH_FORMAT = 6


def install(registry: Registry) -> None:
    """Register the corrections; those whose module is already imported apply at once."""
    cpu_helpers.install()
    for module_name, name, wrap in (
        ("megatron.core.datasets.utils", "compile_helpers", _skip),
        ("megatron.core.utils", "is_te_min_version", _false_when_missing),
        ("megatron.core.fp8_utils", "_quantize_param_shard_impl", _skip_when_empty),
        ("megatron.core.transformer.moe.moe_utils", "maybe_move_tensor_to_cpu", _as_numpy),
        ("megatron.core.dist_checkpointing.strategies.filesystem_async", "_write_item", _with_serialization_format),
        ("megatron.legacy.fused_kernels", "load", _skip),
    ):
        wrapt.register_post_import_hook(_hook(registry, name, wrap), module_name)
    for module_name, correct in (
        ("megatron.core.optimizer.distrib_optimizer", cpu_adam.correct),
        ("megatron.core.dist_checkpointing.mapping", _bring_back_product),
        ("megatron.core.tensor_parallel.random", _silence_generator_warning),
    ):
        wrapt.register_post_import_hook(_while_active(registry, correct), module_name)


def _while_active(registry: Registry, correct: Callable[[Registry, ModuleType], None]) -> Callable[[ModuleType], None]:
    """Return the import hook that calls `correct` unless the stand-in was uninstalled."""

    def apply(module: ModuleType) -> None:
        if registry.active:
            correct(registry, module)

    return apply


def _bring_back_product(registry: Registry, _module: ModuleType) -> None:
    """Give numpy its former name of `prod`."""
    import numpy

    if not hasattr(numpy, "product"):
        registry.set(numpy, "product", numpy.prod)


def _silence_generator_warning(_registry: Registry, module: ModuleType) -> None:
    """Drop one warning; the filter is harmless without the stand-in, so nothing takes it away again."""
    log = logging.getLogger(module.__name__)
    if _keep_record not in log.filters:
        log.addFilter(_keep_record)


def _keep_record(record: logging.LogRecord) -> bool:
    """Return False for the one warning, which Megatron gives no other mark than its text."""
    return record.msg != "CPU RNG state changed within GPU RNG context"


def _hook(
    registry: Registry, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[ModuleType], None]:
    """Return the import hook that replaces `name` by its wrapped self, once, where the module has it."""

    def apply(module: ModuleType) -> None:
        original = getattr(module, name, None) if registry.active else None
        if original is not None and not hasattr(original, "_tft_cpu_stand_in"):
            wrapped = wrap(original)
            wrapped._tft_cpu_stand_in = True  # type: ignore[attr-defined]
            registry.set(module, name, wrapped)

    return apply


def _skip(original: Callable[..., Any]) -> Callable[..., Any]:
    """Do nothing instead."""

    @functools.wraps(original)
    def wrapper(*_args: object, **_kwargs: object) -> None:
        return None

    return wrapper


def _false_when_missing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Answer no to a question about a module that is not there."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except ModuleNotFoundError:
            return False

    return wrapper


def _skip_when_empty(original: Callable[..., Any]) -> Callable[..., Any]:
    """Do nothing when the first argument, the list of parameters to quantise, is empty."""

    @functools.wraps(original)
    def wrapper(model_params: Any, *args: Any, **kwargs: Any) -> Any:
        return original(model_params, *args, **kwargs) if model_params else None

    return wrapper


def _as_numpy(original: Callable[..., Any]) -> Callable[..., Any]:
    """Convert to numpy when asked to, also a tensor that is on the CPU already."""

    @functools.wraps(original)
    def wrapper(tensor: Any, as_numpy: bool = False, *args: Any, **kwargs: Any) -> Any:
        moved = original(tensor, as_numpy, *args, **kwargs)
        return moved.numpy() if as_numpy and hasattr(moved, "numpy") else moved

    return wrapper


def _with_serialization_format(original: Callable[..., Any]) -> Callable[..., Any]:
    """Add torch.save as the format where the caller names none (torch 2.7 added the parameter)."""
    from torch.distributed.checkpoint import filesystem

    # The formats came together with the parameter; without them there is nothing to add.
    formats = getattr(filesystem, "SerializationFormat", None)

    # wraps() also keeps the signature visible: newer Megatron looks for the parameter and passes it itself.
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if formats is not None and len(args) < _ARGUMENTS_WITH_FORMAT:
            kwargs.setdefault("serialization_format", formats.TORCH_SAVE)
        return original(*args, **kwargs)

    return wrapper
