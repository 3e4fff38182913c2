"""Devices other than the CPU, against stand-ins of their runtimes: which calls are made, in which order.

This shows that the code calls the public API as documented. It does not show that the hardware does what it says.
"""

from __future__ import annotations

import sys
import threading
import time
import types
from typing import Any

import pytest
import torch

from mindio_tft_patch.adaptors.device.cuda import CudaDevice
from mindio_tft_patch.adaptors.device.host_wait import HostWait
from mindio_tft_patch.adaptors.device.interface import select_device
from mindio_tft_patch.adaptors.device.npu import NpuDevice
from mindio_tft_patch.adaptors.device.stop_flag import StopFlag
from mindio_tft_patch.config import Config
from mindio_tft_patch.errors import ConfigError, Interrupted
from mindio_tft_patch.processor.progress import ProgressBoard


@pytest.fixture
def npu_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A torch_npu that notes its calls."""
    calls: list[Any] = []
    runtime = types.SimpleNamespace(
        stop_device=lambda index: calls.append(("stop_device", index)),
        restart_device=lambda index: calls.append(("restart_device", index)),
    )
    module = types.ModuleType("torch_npu")
    module.npu = runtime  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    monkeypatch.setattr(
        torch, "npu", types.SimpleNamespace(synchronize=lambda: calls.append("synchronize")), raising=False
    )
    return calls


def test_an_npu_is_stopped_then_restarted_and_synchronised(npu_calls: list[Any]) -> None:
    device = NpuDevice(3, ProgressBoard())
    device.stop()
    device.clean()
    device.synchronize()
    assert npu_calls == [("stop_device", 3), ("restart_device", 3), "synchronize"]


def test_stopping_a_gpu_aborts_every_communicator_and_leaves_gloo_groups_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    aborted: list[str] = []

    class Group:
        def __init__(self, name: str, nccl: bool) -> None:
            self.name, self.nccl = name, nccl

        def _get_backend(self, device: torch.device) -> Any:
            if not self.nccl:
                raise RuntimeError("No backend type associated with device type cuda")
            return types.SimpleNamespace(abort=lambda: aborted.append(self.name))

    groups = {Group("world", True): None, Group("gloo", False): None, Group("data", True): None}
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_world", types.SimpleNamespace(pg_map=groups))
    device = CudaDevice(ProgressBoard())
    device.stop()
    assert aborted == ["world", "data"]
    assert device.flag.stopping


def test_a_device_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"TFT_DEVICE=npu.*Unset TFT_DEVICE"):
        select_device(Config(device="npu"), ProgressBoard())


def test_a_stop_interrupts_training_and_a_recovery_only_when_it_is_newer() -> None:
    flag = StopFlag()
    flag.check()
    flag.stop()
    with pytest.raises(Interrupted):
        flag.check()
    flag.acknowledge()
    with pytest.raises(Interrupted):
        flag.check()  # training must still not go on
    with flag.recovering():
        flag.check()
        flag.stop()  # a second fault
        with pytest.raises(Interrupted):
            flag.check()
    flag.acknowledge()
    flag.clear()
    flag.check()


def test_training_is_not_cleared_while_a_stop_is_unanswered() -> None:
    flag = StopFlag()
    flag.stop()
    flag.acknowledge()
    flag.stop()
    flag.clear()
    with pytest.raises(Interrupted):
        flag.check()


def _thread(body: Any) -> tuple[threading.Thread, threading.Event]:
    end = threading.Event()
    thread = threading.Thread(target=body, args=(end,), daemon=True)
    thread.start()
    time.sleep(0.1)
    return thread, end


def test_a_thread_that_stands_still_is_taken_to_wait_for_others() -> None:
    lock = threading.Lock()
    lock.acquire()
    thread, _ = _thread(lambda end: lock.acquire())  # a call into C, as a device synchronisation is
    assert thread.ident is not None
    wait = HostWait(thread.ident)
    assert [wait(), wait(), wait()] == [False, True, True]
    lock.release()


def test_a_thread_that_computes_or_waits_for_data_is_not() -> None:
    import queue

    def compute(end: threading.Event) -> None:
        while not end.is_set():
            sum(range(50))

    thread, end = _thread(compute)
    assert thread.ident is not None
    wait = HostWait(thread.ident)
    seen = []
    for _ in range(20):
        seen.append(wait())
        time.sleep(0.003)
    end.set()
    assert not all(seen[1:])

    items: queue.Queue[int] = queue.Queue()
    loader, _ = _thread(lambda end: items.get())
    assert loader.ident is not None
    wait = HostWait(loader.ident)
    assert [wait(), wait()] == [False, False]
    items.put(1)
