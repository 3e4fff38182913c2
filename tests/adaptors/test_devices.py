"""Devices other than the CPU, against stand-ins of their runtimes: which calls are made, in which order.

This shows that the code calls the public API as documented. It does not show that the hardware does what it says.
"""

from __future__ import annotations

import threading
import time
import types
from typing import Any

import pytest
import torch
import torch.distributed.distributed_c10d as c10d

from mindio_tft_patch.adaptors.device import regroup
from mindio_tft_patch.adaptors.device.cuda import CudaDevice
from mindio_tft_patch.adaptors.device.host_wait import HostWait
from mindio_tft_patch.adaptors.device.interface import select_device
from mindio_tft_patch.adaptors.device.stop_flag import StopFlag
from mindio_tft_patch.config import Config
from mindio_tft_patch.errors import ConfigError, Interrupted, RecoveryError
from mindio_tft_patch.processor.progress import ProgressBoard


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


class _NcclGroup:
    """A group whose NCCL backend can, or cannot, be rebuilt in place."""

    def __init__(self, name: str, calls: list[Any], *, supported: bool) -> None:
        self.name = name
        self._device_types = (torch.device("cuda"),)
        self._backend = types.SimpleNamespace(
            supports_reconfigure=supported,
            get_reconfigure_handle=lambda: f"handle-of-{name}",
            reconfigure=lambda options: types.SimpleNamespace(
                wait=lambda: calls.append((name, options.handles, options.timeout.total_seconds()))
            ),
        )

    def _get_backend(self, device: torch.device) -> Any:
        return self._backend


def _in_world(monkeypatch: pytest.MonkeyPatch, *groups: _NcclGroup) -> None:
    monkeypatch.setattr(
        c10d,
        "_world",
        types.SimpleNamespace(
            pg_map=dict.fromkeys(groups, ("nccl", None)), pg_names={group: group.name for group in groups}
        ),
    )
    store = torch.distributed.HashStore()
    monkeypatch.setattr(c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: [0])


def test_nccl_groups_are_rebuilt_by_torch_with_time_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    _in_world(monkeypatch, _NcclGroup("world", calls, supported=True), _NcclGroup("data", calls, supported=True))
    device = CudaDevice(ProgressBoard())
    assert device.rebuild_groups(3, (0,), deadline=time.monotonic() + 5, check=lambda: None) == 2
    assert calls == [("data", ["handle-of-data"], 60.0), ("world", ["handle-of-world"], 60.0)]


def test_a_group_of_another_backend_ends_the_attempt_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    _in_world(monkeypatch, _NcclGroup("world", calls, supported=True), _NcclGroup("mine", calls, supported=False))
    with pytest.raises(RecoveryError, match=r"\['mine'\] cannot be rebuilt in place"):
        CudaDevice(ProgressBoard()).rebuild_groups(3, (0,), deadline=0.0, check=lambda: None)
    assert calls == []


def test_the_nccl_implementation_that_cannot_be_rebuilt_is_refused_before_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = CudaDevice(ProgressBoard())
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))

    def chosen(creator: Any) -> None:
        plugin = types.SimpleNamespace(creator_fn=creator)
        monkeypatch.setattr(c10d.Backend, "_plugins", {"NCCL": plugin})

    chosen(c10d._create_nccl_process_group)
    assert "TORCH_DIST_USE_NCCL2=1" in device.in_place_refusal()
    chosen(c10d._create_nccl2_process_group)
    assert device.in_place_refusal() == ""
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    assert device.in_place_refusal() == "NCCL 2.27.3 cannot rebuild groups in place (from 2.28 on)"


def test_a_torch_whose_groups_are_wrapped_for_debugging_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert regroup.missing_support() == ""
    monkeypatch.setattr(torch.distributed, "get_debug_level", lambda: torch.distributed.DebugLevel.DETAIL)
    assert "TORCH_DISTRIBUTED_DEBUG=DETAIL" in regroup.missing_support()


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
    wait()
    deadline = time.monotonic() + 20.0
    while wait():  # on a busy machine the thread may not get its turn between two looks
        assert time.monotonic() < deadline
        time.sleep(0.003)
    end.set()

    items: queue.Queue[int] = queue.Queue()
    loader, _ = _thread(lambda end: items.get())
    assert loader.ident is not None
    wait = HostWait(loader.ident)
    assert [wait(), wait()] == [False, False]
    items.put(1)
