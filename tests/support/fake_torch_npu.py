"""A torch_npu that has no device: it notes its calls and behaves as the source of the real one says.

What it models: a stopped device raises FORCE STOP until it is restarted; a memory error is recorded, is classified by
check_uce_in_memory, and is repaired and forgotten by restart_device; a group's communicator is gone after
reinit_process_group and comes back at the next use; groups are made without handing `enable_reconfigure` to gloo.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

GROUPS_MODULE = "torch_npu.distributed.distributed_c10d"


class FakeTorchNpu:
    """The runtime of one process.

    Args:
        device: index of the current device.
    """

    def __init__(self, device: int = 0) -> None:
        self.device = device
        self.calls: list[Any] = []
        self.stopped: set[int] = set()
        self.memory_answers: dict[int, int] = {}  # device -> what check_uce_in_memory finds until the restart
        self.stop_result: int | None = 0
        self.npu = types.SimpleNamespace(
            stop_device=self._stop, restart_device=self._restart, check_uce_in_memory=self._check_memory
        )
        self.distributed = types.SimpleNamespace(reinit_process_group=self._reinit)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeTorchNpu:
        """Put it where `import torch_npu` and `torch.npu` find it."""
        module = types.ModuleType("torch_npu")
        module.__version__ = "2.14.0"  # type: ignore[attr-defined]
        module.npu = self.npu  # type: ignore[attr-defined]
        module.distributed = self.distributed  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "torch_npu", module)
        torch_side = types.SimpleNamespace(
            synchronize=self._synchronize, current_device=lambda: self.device, is_available=lambda: True
        )
        monkeypatch.setattr(torch, "npu", torch_side, raising=False)
        return self

    def install_group_making(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make groups as torch_npu does: gloo is made by the name in its own module, and connects at once."""
        module = types.ModuleType(GROUPS_MODULE)
        module.ProcessGroupGloo = c10d.ProcessGroupGloo  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, GROUPS_MODULE, module)
        c10d.Backend._ensure_backend_registered("gloo")
        plugin = c10d.Backend._plugins["GLOO"]

        def create(options: Any, backend_options: object | None) -> Any:
            backend = module.ProcessGroupGloo(  # type: ignore[attr-defined]
                options.store, options.group_rank, options.group_size, timeout=options.timeout
            )
            assert isinstance(backend, module.ProcessGroupGloo)  # type: ignore[attr-defined]
            return backend

        monkeypatch.setitem(c10d.Backend._plugins, "GLOO", plugin._replace(creator_fn=create))

    def hit(self, device: int, answer: int) -> None:
        """Memory of a device has an error, of the kind that check_uce_in_memory answers."""
        self.memory_answers[device] = answer

    def _stop(self, device: int) -> int | None:
        self.calls.append(("stop_device", device))
        self.stopped.add(device)
        return self.stop_result

    def _restart(self, device: int) -> None:
        self.calls.append(("restart_device", device))
        self.stopped.discard(device)
        self.memory_answers.pop(device, None)

    def _check_memory(self, device: int) -> int:
        self.calls.append(("check_uce_in_memory", device))
        return self.memory_answers.get(device, 0)

    def _synchronize(self) -> None:
        self.calls.append("synchronize")
        if self.device in self.stopped:
            raise RuntimeError("FORCE STOP.\n[ERROR] ERR00100 PTA call acl api failed")
        if self.device in self.memory_answers:
            raise RuntimeError("NPU function error: UCE ERROR, error code is 507053")

    def _reinit(self, group: Any = None, rebuild_link: bool = True) -> Any:
        self.calls.append(("reinit_process_group", group.name, rebuild_link))
        group.connected = False
        return group


class FakeHcclGroup:
    """A process group over HCCL, or over HCCL and gloo."""

    def __init__(self, name: str, gloo: Any = None) -> None:
        self.name = name
        self.connected = True
        self._hccl = types.SimpleNamespace(name="hccl")
        self._gloo = gloo

    @property
    def _device_types(self) -> list[Any]:
        # A device of type "npu" exists in torch only with torch_npu.
        npu = types.SimpleNamespace(type="npu")
        return [npu] if self._gloo is None else [torch.device("cpu"), npu]

    def _get_backend(self, device: Any) -> Any:
        return self._hccl if device.type == "npu" else self._gloo


def world_of(monkeypatch: pytest.MonkeyPatch, groups: dict[Any, str]) -> None:
    """Make these the groups of this process: group -> backend."""
    names = {group: getattr(group, "name", f"group-{number}") for number, group in enumerate(groups)}
    monkeypatch.setattr(
        dist.distributed_c10d,
        "_world",
        types.SimpleNamespace(pg_map={group: (backend, None) for group, backend in groups.items()}, pg_names=names),
    )
