"""The NPU device against a stand-in of torch_npu: a whole recovery, memory errors, groups.

This shows that the code calls torch_npu as its source says, not that an NPU does what the source says.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from support.fake_torch_npu import FakeHcclGroup, FakeTorchNpu, world_of

from mindio_tft_patch.adaptors.device import npu_memory, regroup
from mindio_tft_patch.adaptors.device.npu import NpuDevice
from mindio_tft_patch.adaptors.device.npu_memory import MemoryKind
from mindio_tft_patch.adaptors.device.unconnected import Unconnected
from mindio_tft_patch.errors import Interrupted, RecoveryError
from mindio_tft_patch.processor.progress import ProgressBoard

_ECC = (
    "synchronize:NPUStream.cpp:12 NPU function error: HBM MULTI BIT ECC ERROR."
    "EE9999: hbm fault, time us= 171234567.\n  TraceBack\ntime is 171234567, error code is 507054"
)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTorchNpu:
    return FakeTorchNpu(device=3).install(monkeypatch)


@pytest.fixture
def device(fake: FakeTorchNpu) -> NpuDevice:
    return NpuDevice(3, ProgressBoard())


def _note_gloo(monkeypatch: pytest.MonkeyPatch, calls: list[Any]) -> None:
    def rebuild(attempt: int, members: Any, **kwargs: Any) -> int:
        parts = regroup._parts(kwargs["parts"])
        calls.append(("gloo", attempt, tuple(members), sorted(parts)))
        return len(parts)

    monkeypatch.setattr(regroup, "rebuild_groups", rebuild)


def _rebuild(device: NpuDevice, attempt: int = 7) -> int:
    return device.rebuild_groups(attempt, (0, 1), deadline=time.monotonic() + 5, check=lambda: None)


def test_a_recovery_stops_asks_restarts_renews_and_reconnects_in_this_order(
    fake: FakeTorchNpu, device: NpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, data = FakeHcclGroup("world"), FakeHcclGroup("data")
    world_of(monkeypatch, {world: "hccl", data: "npu:hccl"})
    _note_gloo(monkeypatch, fake.calls)
    fake.hit(3, 3)
    with pytest.raises(RuntimeError, match="UCE ERROR"):
        device.synchronize()
    device.stop()
    with pytest.raises(RuntimeError, match="FORCE STOP"):
        device.synchronize()
    device.clean()
    device.synchronize()
    weights = torch.full((4,), 7.0)
    device.renew(weights.untyped_storage())
    assert _rebuild(device) == 2
    assert fake.calls == [
        "synchronize",
        ("stop_device", 3),
        "synchronize",
        ("check_uce_in_memory", 3),
        ("restart_device", 3),
        "synchronize",
        ("reinit_process_group", "world", True),
        ("reinit_process_group", "data", True),
        ("gloo", 7, (0, 1), []),
    ]
    assert weights.tolist() == [0.0] * 4
    assert device.flag.stopping  # until training begins again
    assert not (world.connected or data.connected)


def test_the_device_is_the_one_that_the_framework_has_chosen(
    fake: FakeTorchNpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mindio_tft_patch.adaptors.device.npu.host_group", lambda: "gate")
    fake.device = 0  # each process sees one device
    device = NpuDevice(3, ProgressBoard())
    assert device.gate_group() == "gate"
    device.stop()
    assert fake.calls == [("stop_device", 0)]


def test_a_device_that_cannot_be_stopped_is_said_loudly(
    fake: FakeTorchNpu, device: NpuDevice, caplog: pytest.LogCaptureFixture
) -> None:
    fake.stop_result = 1
    device.stop()
    assert "stop_device(3) returned 1" in caplog.text


def test_groups_over_gloo_alone_or_beside_hccl_are_rebuilt_by_torch(
    fake: FakeTorchNpu, device: NpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    gloo = _lone_gloo()

    class Plain:
        name = "gate"
        _device_types = (torch.device("cpu"), torch.device("cuda"))

        def _get_backend(self, device: torch.device) -> Any:
            return gloo

    mixed, own = FakeHcclGroup("mixed", gloo=gloo), FakeHcclGroup("tft-dump-3")
    world_of(monkeypatch, {mixed: "cpu:gloo,npu:hccl", Plain(): "gloo", own: "hccl"})
    _note_gloo(monkeypatch, fake.calls)
    assert _rebuild(device) == 3
    # A recovery's own groups of the past are left alone.
    assert fake.calls == [("reinit_process_group", "mixed", True), ("gloo", 7, (0, 1), ["gate", "mixed/cpu"])]


def test_a_group_that_cannot_be_reinitialised_ends_the_attempt_by_name(
    fake: FakeTorchNpu, device: NpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(group: Any, rebuild_link: bool = True) -> None:
        raise RuntimeError("HCCL function error: HcclCommDestroy\nmore")

    world_of(monkeypatch, {FakeHcclGroup("data"): "hccl"})
    fake.distributed.reinit_process_group = refuse
    with pytest.raises(
        RecoveryError, match="HCCL group data could not be reinitialised: HCCL function error"
    ) as caught:
        _rebuild(device)
    assert not caught.value.collateral


def test_a_stop_ends_a_rebuild_between_two_groups(
    fake: FakeTorchNpu, device: NpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    world_of(monkeypatch, {FakeHcclGroup("a"): "hccl", FakeHcclGroup("b"): "hccl"})
    looks: list[int] = []

    def check() -> None:
        looks.append(1)
        if len(looks) == 2:
            raise Interrupted("newer attempt")

    with pytest.raises(Interrupted):
        device.rebuild_groups(1, (0,), deadline=0.0, check=check)
    assert fake.calls == [("reinit_process_group", "a", True)]


@pytest.mark.parametrize("name", ["stop_device", "restart_device", "check_uce_in_memory"])
def test_a_missing_function_is_refused_by_name(fake: FakeTorchNpu, device: NpuDevice, name: str) -> None:
    assert device.in_place_refusal() == ""
    delattr(fake.npu, name)
    assert device.in_place_refusal() == f"torch_npu 2.14.0 has no torch_npu.npu.{name}"


def test_a_torch_without_rebuilding_is_refused(
    fake: FakeTorchNpu, device: NpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    del fake.distributed.reinit_process_group
    assert "torch_npu.distributed.reinit_process_group" in device.in_place_refusal()
    fake.distributed.reinit_process_group = print
    monkeypatch.setattr(dist, "ProcessGroup", object)
    assert "torch 2.14" in device.in_place_refusal()


def test_a_job_that_only_saves_needs_no_classification(fake: FakeTorchNpu, device: NpuDevice) -> None:
    del fake.npu.check_uce_in_memory
    device.clean()
    assert fake.calls == [("restart_device", 3)]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (0, MemoryKind.NONE),
        (1, MemoryKind.FOREIGN),
        (2, MemoryKind.TEMPORARY),
        (3, MemoryKind.STATE),
        (4, MemoryKind.UNKNOWN),
        (None, MemoryKind.UNKNOWN),
    ],
)
def test_answers_of_the_runtime_have_names(answer: object, kind: MemoryKind) -> None:
    assert npu_memory.kind_of(answer) is kind


@pytest.mark.parametrize(("answer", "text"), [(2, "temporaries only"), (3, "in use by model or optimizer")])
def test_what_was_hit_is_logged(
    fake: FakeTorchNpu, device: NpuDevice, caplog: pytest.LogCaptureFixture, answer: int, text: str
) -> None:
    fake.hit(3, answer)
    device.clean()
    assert text in caplog.text


def test_memory_of_the_runtime_itself_cannot_be_refilled(fake: FakeTorchNpu, device: NpuDevice) -> None:
    fake.hit(3, 1)
    with pytest.raises(RecoveryError, match="memory that torch did not allocate") as caught:
        device.clean()
    assert not caught.value.collateral
    assert fake.calls[-1] == ("restart_device", 3)  # usable again, for whatever comes next


@pytest.mark.parametrize(
    ("message", "moment"),
    [
        (_ECC, 171234567),
        ("HBM MULTI BIT ECC, time us=99", 99),
        ("HBM MULTI BIT ECC ERROR.EE9999time is 12", 12),
        ("HBM MULTI BIT ECC ERROR.time is ", None),
        ("UCE ERROR", None),
    ],
)
def test_the_time_of_an_ecc_error_is_read(message: str, moment: int | None) -> None:
    assert npu_memory.time_of(message) == moment


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (_ECC, "multi-bit ECC error of on-chip memory, at 171234567 us of the device's clock"),
        ("NPU function error: UCE ERROR, error code is 507053", "uncorrectable error in on-chip memory"),
        (
            "UCE ERROR, device error type 2, UCE ERROR",
            "uncorrectable error in on-chip memory, device error type 2 (L2 cache)",
        ),
        ("UCE ERROR device error type 0xFFFF", "uncorrectable error in on-chip memory, device error type 0xFFFF"),
        ("There is unsafe data in the input tensor.", "use of memory that an earlier error has hit"),
        ("FORCE STOP", ""),
        ("out of memory", ""),
    ],
)
def test_a_memory_error_is_described_in_words(device: NpuDevice, message: str, text: str) -> None:
    assert device.describe_memory_fault(RuntimeError(message)) == text


def test_a_wait_on_the_host_ends_when_the_rank_is_stopped(fake: FakeTorchNpu, device: NpuDevice) -> None:
    """Stopping the device does not end a gloo barrier for which a live rank does not come."""
    if dist.is_initialized():
        pytest.skip("another test has left a process group")
    store = dist.HashStore()
    groups: list[Any] = []

    def other() -> None:
        groups.append(c10d.ProcessGroupGloo(store, 1, 2, timeout=timedelta(seconds=20)))

    thread = threading.Thread(target=other)
    thread.start()
    group = c10d.ProcessGroupGloo(store, 0, 2, timeout=timedelta(seconds=20))
    thread.join()
    device.install()
    try:
        threading.Timer(0.3, device.stop).start()
        began = time.monotonic()
        with pytest.raises(Interrupted), device.host_waits():
            group.barrier().wait()
        assert time.monotonic() - began < 5
    finally:
        device._waits.uninstall()
        groups[0].barrier().wait()


def test_a_gloo_group_of_a_returning_process_waits_for_nobody(
    fake: FakeTorchNpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch_npu makes gloo groups itself and does not tell gloo that they are to stay unconnected."""
    if dist.is_initialized():
        pytest.skip("another test has left a process group")
    fake.install_group_making(monkeypatch)
    unconnected = Unconnected()
    unconnected.enter()
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=2, timeout=timedelta(seconds=3))
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert backend.supports_reconfigure and isinstance(backend, c10d.ProcessGroupGloo)
        assert backend.get_reconfigure_handle()
    finally:
        unconnected.leave()
        if dist.is_initialized():
            dist.destroy_process_group()
    # Afterwards groups connect as ever: here, nobody comes.
    with pytest.raises((RuntimeError, dist.DistError)):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=2, timeout=timedelta(seconds=0.5))


def _lone_gloo() -> Any:
    return c10d.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=timedelta(seconds=5))
