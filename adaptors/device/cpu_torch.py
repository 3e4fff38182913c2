"""What stands in for what in torch: the CUDA module, device arguments, and a few helpers around them.

Nothing here computes anything: results are torch's own CPU results, bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from types import SimpleNamespace, TracebackType
from typing import Any

import torch
from mindio_tft_patch.adaptors.device.cpu_registry import Registry

CPU = torch.device("cpu")

_FACTORIES = [
    "arange",
    "as_tensor",
    "asarray",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "logspace",
    "normal",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "scalar_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
    "zeros_like",
]
_TENSOR_FACTORIES = ["new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros"]
# Tensor.type() of a CPU tensor is 'torch.FloatTensor'; Megatron sorts parameters by 'torch.cuda.FloatTensor'.
_TENSOR_TYPES = ["Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool"]


class Stream:
    """A stream on which all work is finished as soon as it is issued."""

    cuda_stream = 0
    priority = 0
    device = CPU

    def __init__(self, *_args: object, **_kwargs: object) -> None: ...

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return least and greatest priority; there is one only."""
        return (0, 0)

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event that has happened."""
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Return that all work is done."""
        return True

    def synchronize(self) -> None:
        """Wait for nothing."""

    def wait_event(self, event: object) -> None:
        """Wait for nothing."""

    def wait_stream(self, stream: object) -> None:
        """Wait for nothing."""

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Event:
    """An event; remembers when it was recorded so that elapsed times are real."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        self._recorded_at = 0.0

    def record(self, stream: object = None) -> None:
        """Note the time."""
        self._recorded_at = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        """Return milliseconds between two recorded events."""
        return (end_event._recorded_at - self._recorded_at) * 1000.0

    def query(self) -> bool:
        """Return that the event has happened."""
        return True

    def synchronize(self) -> None:
        """Wait for nothing."""

    def wait(self, stream: object = None) -> None:
        """Wait for nothing."""


class Device(contextlib.ContextDecorator):
    """`torch.cuda.device(i)` and `device_of(tensor)`: a context that changes nothing."""

    def __init__(self, *_args: object, **_kwargs: object) -> None: ...

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_exc: object) -> None: ...


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
        # A lambda: Dynamo keeps a table of torch functions by identity and refuses one that it meets twice.
        "initial_seed": lambda: generator.initial_seed(),
    }
    table |= dict.fromkeys(
        [
            "memory_allocated",
            "max_memory_allocated",
            "memory_reserved",
            "max_memory_reserved",
            "device_memory_used",
            "utilization",
            "temperature",
            "power_draw",
            "clock_rate",
            "reset_peak_memory_stats",
            "reset_max_memory_allocated",
            "reset_accumulated_memory_stats",
        ],
        zero,
    )
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
    """DataLoader, torch.compile and init_process_group."""
    import torch.distributed
    import torch.utils.data

    loader = torch.utils.data.DataLoader
    make_loader = loader.__init__

    @functools.wraps(make_loader)
    def init_loader(self: Any, *args: Any, **kwargs: Any) -> None:
        # Nothing to pin memory for, and torch warns at every loader that asks.
        kwargs.pop("pin_memory", None)
        make_loader(self, *args, **kwargs)

    registry.set(loader, "__init__", init_loader)
    # Identity: what compilation would give changes the last bits and costs seconds to import.
    registry.set(torch, "compile", _compile_nothing)
    if "torch._dynamo.config" in sys.modules:
        # Imported before us, so it missed the environment variable. It has no plain attributes to register.
        sys.modules["torch._dynamo.config"].disable = True  # type: ignore[attr-defined]

    init_group = torch.distributed.init_process_group

    @functools.wraps(init_group)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        # A group bound to a CUDA device would make the barrier look for that device.
        kwargs.pop("device_id", None)
        return init_group(*args, **kwargs)

    for module in (torch.distributed, torch.distributed.distributed_c10d):
        registry.set(module, "init_process_group", init_process_group)


def _returns(value: object) -> Callable[..., Any]:
    """Return a function that takes anything and returns `value`."""
    return lambda *_args, **_kwargs: value


def _call_now(callback: Callable[[], object], **_kwargs: object) -> None:
    """`torch.cuda._lazy_call`: there is no initialisation to wait for."""
    callback()


def _manual_seed(seed: int) -> None:
    """Seed the one generator there is."""
    torch.default_generator.manual_seed(int(seed))


def _device_count() -> int:
    """Return the ranks of this node, so that each finds 'its' device."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _compile_nothing(model: Callable[..., Any] | None = None, **_kwargs: object) -> Any:
    """`torch.compile` as plain call and as decorator with arguments."""
    return model if model is not None else lambda function: function


def _is_cuda(device: object) -> bool:
    """Return whether a device argument means CUDA: an index, 'cuda', 'cuda:1' or such a torch.device."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
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
