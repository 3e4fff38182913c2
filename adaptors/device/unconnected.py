"""Set-up of a process that takes the place of a lost one: its groups exist, but nobody is connected to them yet.

The other ranks wait in the middle of training; none of them repeats the collectives of a set-up. So they are answered
here, as if every member of the group held what this rank holds: a barrier is over at once, a broadcast or a reduction
leaves the tensor as it is, a gathering repeats this rank's part. What depends on the others for real (weights,
counters, flags that rank 0 has broadcast) is taken over from them when the groups are connected.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from mindio_tft_patch.adaptors.device import npu_groups
from mindio_tft_patch.adaptors.device.cpu_registry import Registry

log = logging.getLogger("mindio_tft_patch.rebuild")


class _Over:
    """The work of a collective that was answered here."""

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


def _nothing(*args: Any, **kwargs: Any) -> Any:
    return _Over() if kwargs.get("async_op") else None


def _all_gather(tensor_list: list[torch.Tensor], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    own = tensor.clone()  # it may be a part of what is written
    for place in tensor_list:
        place.copy_(own)
    return _nothing(*args, **kwargs)


def _all_gather_into(output: torch.Tensor, part: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    output.view(-1, part.numel()).copy_(part.reshape(1, -1).clone())  # often a part of the output
    return _nothing(*args, **kwargs)


def _all_gather_object(object_list: list[Any], obj: Any, *args: Any, **kwargs: Any) -> None:
    object_list[:] = [obj] * len(object_list)


def _gather_object(obj: Any, object_gather_list: list[Any] | None = None, *args: Any, **kwargs: Any) -> None:
    if object_gather_list is not None:
        object_gather_list[:] = [obj] * len(object_gather_list)


def _reduce_scatter(output: torch.Tensor, whole: Any, *args: Any, **kwargs: Any) -> Any:
    parts = whole if isinstance(whole, (list, tuple)) else whole.view(-1, output.numel())
    output.copy_(parts[0].reshape(output.shape).clone())
    return _nothing(*args, **kwargs)


def _all_to_all_single(output: torch.Tensor, whole: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if output.numel() == whole.numel():
        output.copy_(whole.reshape(output.shape).clone())
    return _nothing(*args, **kwargs)


_ANSWERS: dict[str, Callable[..., Any]] = {
    "barrier": _nothing,
    "monitored_barrier": _nothing,
    "broadcast": _nothing,
    "broadcast_object_list": _nothing,
    "all_reduce": _nothing,
    "reduce": _nothing,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into,
    "_all_gather_base": _all_gather_into,
    "all_gather_object": _all_gather_object,
    "gather_object": _gather_object,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter,
    "_reduce_scatter_base": _reduce_scatter,
    "all_to_all_single": _all_to_all_single,
}


class Unconnected:
    """While entered: groups are made without connections, and collectives are answered here.

    Args:
        packages: whose modules may have taken functions of torch.distributed by name before.
    """

    def __init__(self, packages: Iterable[str] = ("megatron",)) -> None:
        self._packages = tuple(packages)
        self._registry = Registry()
        self._stand_ins: dict[int, tuple[Any, Any]] = {}

    @property
    def active(self) -> bool:
        """Are collectives answered here?"""
        return self._registry.active

    def enter(self) -> None:
        """From here on nothing goes out to other ranks."""
        if self.active:
            return
        self._registry.active = True
        original = c10d._new_process_group_helper

        def make(*args: Any, **kwargs: Any) -> Any:
            # A group that is bound to a device connects at once.
            return original(*args, **{**kwargs, "enable_reconfigure": True, "device_id": None})

        self._registry.set(c10d, "_new_process_group_helper", make)
        npu_groups.make_gloo_unconnected(self._registry)
        self._registry.set(c10d, "_store_based_barrier", _nothing)
        for name, answer in _ANSWERS.items():
            if hasattr(c10d, name):
                self._answer(name, answer)
        for package in self._packages:
            self._registry.rebind_importers(sys.modules, prefix=package)
        log.info("set-up without the other ranks: collectives are answered here until communication is rebuilt")

    def leave(self) -> None:
        """Collectives are real again; call it when the groups are about to be connected."""
        if not self.active:
            return
        self._registry.revert()
        self._registry.active = False
        # A module that was imported meanwhile may have taken a stand-in for the real function.
        for module in list(sys.modules.values()):
            for name, value in list(getattr(module, "__dict__", {}).items()):
                found = self._stand_ins.get(id(value))
                if found is not None and found[0] is value:
                    setattr(module, name, found[1])
        self._stand_ins.clear()

    def _answer(self, name: str, answer: Callable[..., Any]) -> None:
        # One function for each name, so that leave() can tell whose place it has taken.
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            return answer(*args, **kwargs)

        original = getattr(c10d, name)
        self._stand_ins[id(stand_in)] = (stand_in, original)
        for module in (dist, c10d):
            if hasattr(module, name):
                self._registry.set(module, name, stand_in)
