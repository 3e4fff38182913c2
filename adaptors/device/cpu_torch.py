"""What stands in for what in torch: the CUDA module, device arguments, and a few helpers around them.

Nothing here computes anything: results are torch's own CPU results, bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch

from mindio_tft_patch.adaptors.device.cpu_registry import Registry
from mindio_tft_patch.adaptors.device.cpu_streams import Device, Event, Stream

CPU = torch.device("cpu")
_ACCELERATORS = ("cuda", "npu")

# fmt: off
_FACTORIES = (
    "arange", "as_tensor", "asarray", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace",
    "logspace", "normal", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like",
    "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros", "zeros_like",
)
_ZERO_STATISTICS = (
    "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "device_memory_used",
    "utilization", "temperature", "power_draw", "clock_rate", "reset_peak_memory_stats",
    "reset_max_memory_allocated", "reset_accumulated_memory_stats",
)
# fmt: on
_TENSOR_FACTORIES = ["new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros"]
# Tensor.type() of a CPU tensor is 'torch.FloatTensor'; Megatron sorts parameters by 'torch.cuda.FloatTensor'.
_TENSOR_TYPES = ["Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool"]


class _Generators(tuple[torch.Generator, ...]):
    """The CPU generator under every device index, so that any LOCAL_RANK finds it."""

    def __getitem__(self, index: Any) -> Any:
        return torch.default_generator


class _CurrentDevice:
    """The index that `set_device` was given; only remembered."""

    def __init__(self) -> None:
        self.index = 0

    def set(self, device: object = 0) -> None:
        """Remember the index of an int, 'cuda:1' or torch.device."""
        if isinstance(device, int):
            self.index = max(device, 0)
        elif isinstance(device, (str, torch.device)):
            self.index = torch.device(device).index or 0

    def get(self) -> int:
        """Return the index."""
        return self.index


def install(registry: Registry) -> None:
    """Install everything in this file."""
    _install_cuda_module(registry)
    _install_cuda_submodules(registry)
    _install_accelerator(registry)
    _install_device_arguments(registry)
    _install_tensor_methods(registry)
    _install_around(registry)


def _install_cuda_module(registry: Registry) -> None:
    """Devices, streams, memory and generators of `torch.cuda`."""
    current = _CurrentDevice()
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    properties = SimpleNamespace(
        name="CPU stand-in", major=8, minor=0, total_memory=memory_bytes, multi_processor_count=os.cpu_count() or 1
    )
    generator = torch.default_generator
    stream = Stream()
    zero = _returns(0)
    table: dict[str, object] = {
        "is_available": _returns(True),
        "is_initialized": _returns(True),
        "is_bf16_supported": _returns(True),
        "is_current_stream_capturing": _returns(False),
        "_is_in_bad_fork": _returns(False),
        "init": _returns(None),
        "_lazy_init": _returns(None),
        "_lazy_call": _call_now,
        "device_count": _device_count,
        "current_device": current.get,
        "set_device": current.set,
        "device": Device,
        "device_of": Device,
        "get_device_properties": _returns(properties),
        "get_device_capability": _returns((properties.major, properties.minor)),
        "get_device_name": _returns(properties.name),
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": Event,
        # One context object may be entered twice (Megatron 0.12 does), so a reusable one is needed.
        "stream": lambda _stream: contextlib.nullcontext(),
        "set_stream": _returns(None),
        "current_stream": _returns(stream),
        "default_stream": _returns(stream),
        "synchronize": _returns(None),
        "empty_cache": _returns(None),
        "ipc_collect": _returns(None),
        "cudart": _returns(SimpleNamespace(cudaProfilerStart=zero, cudaProfilerStop=zero)),
        "mem_get_info": _returns((memory_bytes, memory_bytes)),
        "memory_stats": lambda *_args, **_kwargs: defaultdict(int),
        "memory_summary": _returns(""),
        "memory_snapshot": lambda *_args, **_kwargs: [],
        "default_generators": _Generators((generator,)),
        "get_rng_state": lambda *_args, **_kwargs: generator.get_state(),
        "get_rng_state_all": lambda: [generator.get_state()],
        "set_rng_state": lambda state, *_args, **_kwargs: generator.set_state(state),
        "set_rng_state_all": lambda states: generator.set_state(states[0]),
        "manual_seed": _manual_seed,
        "manual_seed_all": _manual_seed,
        "seed": _returns(None),
        "seed_all": _returns(None),
        "initial_seed": _initial_seed,
    }
    table |= dict.fromkeys(_ZERO_STATISTICS, zero)
    table |= {f"{kind}Tensor": getattr(torch, f"{kind}Tensor") for kind in _TENSOR_TYPES}
    for name, value in table.items():
        registry.set(torch.cuda, name, value)


def _install_cuda_submodules(registry: Registry) -> None:
    """The same functions under their second names: torch.cuda.random, .memory, .nvtx, .profiler."""
    for submodule in (torch.cuda.random, torch.cuda.memory, torch.cuda.streams):
        for name in set(vars(submodule)) & set(vars(torch.cuda)):
            value = vars(torch.cuda)[name]
            if not name.startswith("__") and vars(submodule)[name] is not value and callable(value):
                registry.set(submodule, name, value)
    for name in ("_record_memory_history", "_dump_snapshot"):
        registry.set(torch.cuda.memory, name, _returns(None))
    registry.set(torch.cuda.memory, "_snapshot", lambda *_args, **_kwargs: {"segments": [], "device_traces": []})
    for name in ("range_push", "range_pop", "mark"):
        registry.set(torch.cuda.nvtx, name, _returns(0))
    registry.set(torch.cuda.nvtx, "range", lambda *_args, **_kwargs: contextlib.nullcontext())
    for name in ("start", "stop"):
        registry.set(torch.cuda.profiler, name, _returns(None))


def _install_accelerator(registry: Registry) -> None:
    """`torch.accelerator` tells the truth: there is none. torch uses it to decide on pinned memory."""
    for name, value in {
        "is_available": _returns(False),
        "current_accelerator": _returns(None),
        "device_count": _returns(0),
        "synchronize": _returns(None),
        "empty_cache": _returns(None),
    }.items():
        if hasattr(torch.accelerator, name):
            registry.set(torch.accelerator, name, value)


def _install_device_arguments(registry: Registry) -> None:
    """Everything that takes a device argument takes 'cuda' for the CPU."""
    for owner, names in ((torch, _FACTORIES), (torch.Tensor, _TENSOR_FACTORIES)):
        for name in names:
            registry.set(owner, name, _on_cpu(getattr(owner, name)))
    for owner in (torch.Tensor, torch.nn.Module):
        registry.set(owner, "to", _to_cpu(owner.to))
        registry.set(owner, "cuda", lambda self, *_args, **_kwargs: self)
    registry.set(torch, "load", _load_to_cpu(torch.load))


def _install_tensor_methods(registry: Registry) -> None:
    """Methods of a tensor that have a meaning on an accelerator only."""
    registry.set(torch.Tensor, "pin_memory", lambda self, *_args, **_kwargs: self)
    registry.set(torch.Tensor, "is_pinned", _returns(False))
    registry.set(torch.Tensor, "record_stream", _returns(None))
    original = torch.Tensor.type

    @functools.wraps(original)
    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], str):
            return original(self, args[0].replace("torch.cuda.", "torch.", 1), *args[1:], **kwargs)
        if args or kwargs:
            return original(self, *args, **kwargs)
        return original(self).replace("torch.", "torch.cuda.", 1)

    registry.set(torch.Tensor, "type", type_name)


def _install_around(registry: Registry) -> None:
    """DataLoader and torch.compile."""
    import torch.utils.data

    loader = torch.utils.data.DataLoader
    make_loader = loader.__init__

    @functools.wraps(make_loader)
    def init_loader(self: Any, *args: Any, **kwargs: Any) -> None:
        # Nothing to pin memory for, and torch warns at every loader that asks.
        kwargs.pop("pin_memory", None)
        # A loader draws a seed at every iter(). On a GPU machine that leaves the device's generator alone, so that
        # a resumed run draws the same dropout masks; here both are one, and the loader needs its own.
        if kwargs.get("generator") is None:
            kwargs["generator"] = torch.Generator().manual_seed(torch.initial_seed())
        make_loader(self, *args, **kwargs)

    registry.set(loader, "__init__", init_loader)
    # Identity: what compilation would give changes the last bits and costs seconds to import.
    registry.set(torch, "compile", _compile_nothing)
    if "torch._dynamo.config" in sys.modules:
        # Imported before us, so it missed the environment variable. It has no plain attributes to register.
        sys.modules["torch._dynamo.config"].disable = True  # type: ignore[attr-defined]


def _returns(value: object) -> Callable[..., Any]:
    """Return a function that takes anything and returns `value`."""
    return lambda *_args, **_kwargs: value


def _call_now(callback: Callable[[], object], **_kwargs: object) -> None:
    """`torch.cuda._lazy_call`: there is no initialisation to wait for."""
    callback()


def _manual_seed(seed: int) -> None:
    """Seed the one generator there is."""
    torch.default_generator.manual_seed(int(seed))


def _initial_seed() -> int:
    """Return the seed. A function of ours: Dynamo refuses a function of torch that it meets under two names."""
    return int(torch.default_generator.initial_seed())


def _device_count() -> int:
    """Return the ranks of this node, so that each finds 'its' device."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _compile_nothing(model: Callable[..., Any] | None = None, **_kwargs: object) -> Any:
    """`torch.compile` as plain call and as decorator with arguments."""
    return model if model is not None else lambda function: function


def _is_cuda(device: object) -> bool:
    """Return whether a device argument means the accelerator: an index, 'cuda', 'cuda:1' or such a torch.device.

    MindSpeed calls its device 'npu' in some places and 'cuda' in others.
    """
    if isinstance(device, torch.device):
        return device.type in _ACCELERATORS
    if isinstance(device, str):
        return device.partition(":")[0] in _ACCELERATORS
    return isinstance(device, int) and not isinstance(device, bool)


def _cpu_keywords(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return keywords with a CUDA device replaced by the CPU and without pinned memory."""
    if _is_cuda(kwargs.get("device")):
        kwargs["device"] = CPU
    kwargs.pop("pin_memory", None)
    return kwargs


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a tensor factory."""

    @functools.wraps(factory)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return factory(*args, **(_cpu_keywords(kwargs) if kwargs else kwargs))

    return wrapper


def _to_cpu(to: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Tensor.to` or `Module.to`, whose first argument may be a device, a dtype or a tensor."""

    @functools.wraps(to)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return to(self, *_first_on_cpu(args), **_cpu_keywords(kwargs))

    return wrapper


def _first_on_cpu(args: tuple[Any, ...]) -> Iterable[Any]:
    """Return positional arguments with a CUDA device in front replaced by the CPU."""
    return (CPU, *args[1:]) if args and _is_cuda(args[0]) else args


def _load_to_cpu(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `torch.load`: a checkpoint may name CUDA devices, and so may `map_location`."""

    @functools.wraps(load)
    def wrapper(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if map_location is None or _is_cuda(map_location):
            map_location = CPU
        return load(file, map_location, *args, **kwargs)

    return wrapper
