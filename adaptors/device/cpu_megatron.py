"""Corrections inside Megatron that the CPU stand-in needs, applied when the module in question is imported.

| module | name | why |
|---|---|---|
| core.datasets.utils | compile_helpers | runs make in Megatron's own folder; see `cpu_helpers.py` |
| core.fp8_utils | _quantize_param_shard_impl | core_v0.12 raises without Transformer Engine, even with nothing to do |
| legacy.fused_kernels | load | core_v0.12 looks for the CUDA compiler |
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt
from mindio_tft_patch.adaptors.device import cpu_helpers
from mindio_tft_patch.adaptors.device.cpu_registry import Registry


def install(registry: Registry) -> None:
    """Register the corrections; those whose module is already imported apply at once."""
    cpu_helpers.install()
    for module_name, name, wrap in (
        ("megatron.core.datasets.utils", "compile_helpers", _skip),
        ("megatron.core.fp8_utils", "_quantize_param_shard_impl", _skip_when_empty),
        ("megatron.legacy.fused_kernels", "load", _skip),
    ):
        wrapt.register_post_import_hook(_hook(registry, name, wrap), module_name)


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


def _skip_when_empty(original: Callable[..., Any]) -> Callable[..., Any]:
    """Do nothing when the first argument, the list of parameters to quantise, is empty."""

    @functools.wraps(original)
    def wrapper(model_params: Any, *args: Any, **kwargs: Any) -> Any:
        return original(model_params, *args, **kwargs) if model_params else None

    return wrapper
