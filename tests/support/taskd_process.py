"""MindCluster's TaskD, its Python unmodified, with the cluster's side of its library played through pipes.

    taskd_process.py CHECKOUT/component/taskd manager     framework/manager (current), over libtaskd.so
    taskd_process.py CHECKOUT/component/taskd recover     toolkit/recover_module (older), over gRPC

What TaskD sends to the cluster is written to standard output, one JSON object a line; what the cluster orders is read
from standard input, likewise: {"actions": ["stop_train"], "fault_ranks": {"1": 1}, "strategy": "", "timeout": 0, ...}.
{"action": "listening"} says that it takes orders from now on: the older one looks every five seconds for a job.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import mindio_tft_patch  # noqa: F401  (makes mindio_ttp importable)

_write = threading.Lock()


def to_cluster(message: dict[str, Any]) -> None:
    with _write:
        sys.__stdout__.write(json.dumps(message) + "\n")
        sys.__stdout__.flush()


def from_cluster() -> Iterator[dict[str, Any]]:
    to_cluster({"action": "listening"})
    for line in sys.stdin:
        yield json.loads(line)


# libtaskd.so.


class Library:
    """What TaskD's Python calls in its library."""

    def __init__(self) -> None:
        self.callback: Any = None

        # Plain functions, because TaskD sets `argtypes` and `restype` on them.
        def send(text: bytes) -> int:
            to_cluster(json.loads(text))
            return 0

        def register(callback: Any) -> None:
            self.callback = callback

        def start() -> int:
            for order in from_cluster():
                self.callback(json.dumps(order).encode())
            return 0

        self.SendMessageToBackend = send
        self.RegisterBackendCallback = register
        self.InitTaskdManager = lambda config: 0
        self.StartTaskdManager = start


def run_manager() -> None:
    from taskd.python.cython_api import cython_api

    cython_api.lib = Library()
    from taskd.python.framework.manager.manager import Manager

    manager = Manager()
    assert manager.init_taskd_manager({})
    assert manager.start_taskd_manager()


# gRPC.


class Message:
    """A message of recover.proto: fields appear when they are used."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made: Any = [] if name in ("faultRanks", "strategies", "actions") else Message()
        setattr(self, name, made)
        return made


def _ranks(request: Message) -> dict[str, int]:
    return {one.rankId: int(one.faultType) for one in request.faultRanks}


class Stub:
    """What TaskD calls in clusterd."""

    def __init__(self, channel: object) -> None:
        self._good = Message(code=0, info="")

    def Init(self, request: Message) -> Message:  # noqa: N802 - names of the service
        return self._good

    Register = HealthCheck = Init

    def SubscribeProcessManageSignal(self, request: Message) -> Iterator[Message]:  # noqa: N802
        for order in from_cluster():
            ranks = [Message(rankId=rank, faultType=str(kind)) for rank, kind in order.get("fault_ranks", {}).items()]
            yield Message(
                jobId=request.jobId,
                uuid="",
                signalType="",
                actions=order["actions"],
                faultRanks=ranks,
                changeStrategy=order.get("strategy", ""),
                timeout=order.get("timeout", 0),
            )
        while True:  # the end of the input is the end of the test, not of the stream
            time.sleep(3600)

    def ReportProcessFault(self, request: Message) -> Message:  # noqa: N802
        to_cluster({"action": "process_fault", "fault_ranks": _ranks(request)})
        return self._good

    def ReportStopComplete(self, request: Message) -> Message:  # noqa: N802
        status = {"code": request.status.code, "msg": request.status.info}
        to_cluster({"action": "stop_complete", "fault_ranks": _ranks(request), **status})
        return self._good

    def ReportRecoverStrategy(self, request: Message) -> Message:  # noqa: N802
        words = {"strategy_list": request.strategies}
        to_cluster({"action": "recover_strategy", "fault_ranks": _ranks(request), **words})
        return self._good

    def ReportRecoverStatus(self, request: Message) -> Message:  # noqa: N802
        status = {"code": request.status.code, "msg": request.status.info, "strategy": request.strategy}
        to_cluster({"action": "recover_status", **status})
        return self._good


def run_recover() -> None:
    grpc = ModuleType("grpc")
    grpc.insecure_channel = lambda address, options: SimpleNamespace()  # type: ignore[attr-defined]
    messages = ModuleType("recover_pb2")
    for name in ("ClientInfo", "Status", "ProcessManageSignal", "FaultRank", "ProcessFaultRequest"):
        setattr(messages, name, Message)
    for name in ("StopCompleteRequest", "RecoverStrategyRequest", "RecoverStatusRequest"):
        setattr(messages, name, Message)
    service = ModuleType("recover_pb2_grpc")
    service.RecoverStub = Stub  # type: ignore[attr-defined]
    package = "taskd.python.toolkit.recover_module.pb"
    pb = ModuleType(package)
    pb.recover_pb2, pb.recover_pb2_grpc = messages, service  # type: ignore[attr-defined]
    sys.modules |= {"grpc": grpc, package: pb}
    sys.modules |= {f"{package}.recover_pb2": messages, f"{package}.recover_pb2_grpc": service}
    from taskd.python.toolkit.recover_module import recover_manager

    recover_manager.init_grpc_process()


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    {"manager": run_manager, "recover": run_recover}[sys.argv[2]]()
