"""A job of SDK clients in one process: each rank has a Processor, a training thread, and callbacks that take notes.

The training function counts steps behind a gate that all ranks pass together, as a framework's barrier does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mindio_tft_patch.adaptors.sdk import training
from mindio_tft_patch.adaptors.sdk.accelerator import Accelerator
from mindio_tft_patch.adaptors.sdk.callbacks import KINDS
from mindio_tft_patch.adaptors.sdk.leaving import Leaving
from mindio_tft_patch.adaptors.sdk.mainline import Verdict
from mindio_tft_patch.adaptors.sdk.processor import Processor
from mindio_tft_patch.config import Config
from mindio_tft_patch.protocol.endpoint import Endpoint

IN_PLACE_CALLBACKS = ("stop", "clean", "rebuild_group", "repair", "rollback", "save_ckpt", "rename", "stream_sync")


class MemoryStore:
    """The job's store, for ranks that are threads."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str, /) -> None:
        self.values[key] = value.encode()

    def get(self, key: str, /) -> bytes:
        return self.values[key]

    def check(self, keys: list[str], /) -> bool:
        return all(key in self.values for key in keys)


class QuietAccelerator(Accelerator):
    """Notes that memory is to be given back: collecting garbage for each of many ranks would stop them all for long."""

    def __init__(self) -> None:
        super().__init__()
        self.given_back: list[bool] = []

    def give_memory_back(self, *, collect: bool = True) -> None:
        self.given_back.append(collect)


@dataclass
class Call:
    """One call of a callback."""

    name: str
    arguments: tuple[Any, ...]
    thread: str


class Gate:
    """All ranks pass together; one that is stopped leaves with FORCE STOP."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._changed = threading.Condition()
        self._come: dict[int, set[int]] = {}

    def forget(self) -> None:
        with self._changed:
            self._come.clear()

    def pass_together(self, rank: int, step: int, check: Callable[[], None]) -> None:
        with self._changed:
            self._come.setdefault(step, set()).add(rank)
            self._changed.notify_all()
            while len(self._come[step]) < self._ranks:
                self._changed.wait(0.01)
                try:
                    check()
                except BaseException:
                    self._come[step].discard(rank)
                    raise


@dataclass
class Options:
    """What a rank of the job does.

    faults: exceptions by step, raised once each.
    """

    steps: int = 1_000_000
    callbacks: tuple[str, ...] = IN_PLACE_CALLBACKS
    replicas: list[dict[str, Any]] | None = None
    enable_uce: bool = True
    enable_arf: bool = True
    local_copy: bool = False
    framework: str = "MindSpeed-LLM"
    faults: dict[int, BaseException] = field(default_factory=dict)
    clean_returns: int = 0
    loads: int = 0  # step of the checkpoint that the repair callback "loads"; 0: it loads none


class Rank:
    """One rank.

    Attributes:
        calls: of its callbacks.
        entered: how often the training function was called.
        ended: what its training function or decorator has left with.
    """

    def __init__(
        self,
        config: Config,
        endpoint: Endpoint,
        rank: int,
        size: int,
        options: Options,
        *,
        store: MemoryStore,
        gate: Gate,
    ) -> None:
        self.rank, self.size, self.options, self.gate = rank, size, options, gate
        self.calls: list[Call] = []
        self.entered = 0
        self.ended: BaseException | str | None = None
        self.deaths: list[int] = []
        self.accelerator = QuietAccelerator()
        self.stopped = threading.Event()
        self.over = threading.Event()
        self.fails_in_update: BaseException | None = None
        environ = {
            "TFT_HEARTBEAT_SECONDS": str(config.heartbeat_seconds),
            "TFT_HEARTBEATS_MISSED": str(config.heartbeats_missed),
            "TTP_OT": str(config.dump_timeout_seconds),
            "TTP_RETRY_TIMES": str(config.retry_times),
        }
        self.processor = Processor(
            environ,
            find=lambda *ignored: endpoint,
            store=lambda ignored: store,
            accelerator=self.accelerator,
            leaving=Leaving(0.5, self.deaths.append),
            log_to=lambda *ignored, **others: None,
        )
        self.step = 0
        self.arguments: tuple[Any, ...] = (["the model of rank", rank], ["test data"])
        self.thread = threading.Thread(target=self._run, name=f"training {rank}", daemon=True)

    def start(self) -> Rank:
        options, processor = self.options, self.processor
        processor.init(
            rank=self.rank,
            world_size=self.size,
            enable_local_copy=options.local_copy,
            enable_tls=True,
            tls="",
            enable_uce=options.enable_uce,
            enable_arf=options.enable_arf,
            enable_zit=False,
        )
        processor.start("127.0.0.1", 8000, "")
        everybody = {"rank_list": list(range(self.size)), "replica_cnt": self.size, "replica_shift": 0}
        processor.set_replicas(self.rank, options.replicas or [everybody])
        for kind in KINDS:
            if kind.name in options.callbacks:
                self.register(kind.name)
        self.thread.start()
        return self

    def register(self, name: str) -> None:
        def callback(*arguments: Any) -> Any:
            self.calls.append(Call(name, arguments, threading.current_thread().name))
            return getattr(self, f"_{name}", lambda *ignored: None)(*arguments)

        self.processor.register(name, {"func": callback, "ctx": f"context of {name}"})

    def dies(self) -> None:
        """The process ends: no more heartbeats, and no more training."""
        client = self.processor._client
        assert client is not None
        self.over.set()
        client.close()
        self.processor.mainline.release(Verdict.LEAVE)

    def ends(self) -> None:
        self.over.set()
        self.processor.close()
        self.thread.join(5)

    def named(self, name: str) -> list[Call]:
        return [call for call in self.calls if call.name == name]

    @property
    def order(self) -> list[str]:
        return [call.name for call in self.calls]

    # Callbacks that do something.

    def _stop(self, args: Any, ctx: Any) -> None:
        self.stopped.set()

    def _clean(self, is_uce_error: bool, args: Any, ctx: Any) -> int:
        self.stopped.clear()
        return self.options.clean_returns

    def _repair(self, *arguments: Any) -> None:
        info = arguments[3]
        if info["repair_type"] in (5, 6) and self.options.loads:
            self.processor.report_loaded(self.options.loads)

    def _rollback(self, step: int, args: Any, ctx: Any) -> None:
        self.gate.forget()
        self.step = step

    # Training.

    def _run(self) -> None:
        decorated = training.decorated(lambda: self.processor, self._train, destroy=self.processor.finish)
        try:
            decorated(*self.arguments)
            self.ended = "returned"
        except BaseException as problem:
            self.ended = problem

    def _train(self, *arguments: Any) -> None:
        self.entered += 1
        if self.options.framework:
            training.export_version(self.processor, self.options.framework)
        if self.processor.returning:
            raise RuntimeError("ARF FINISH")
        while self.step < self.options.steps:
            self._check()
            self._one_step(self.step + 1)

    def _check(self) -> None:
        if self.over.is_set():
            raise SystemExit("the test is over")
        if self.stopped.is_set():
            raise RuntimeError("FORCE STOP by the test's stop callback")

    def _one_step(self, step: int) -> None:
        time.sleep(0.01)
        fault = self.options.faults.pop(step, None)
        if fault is not None:
            raise fault
        self.gate.pass_together(self.rank, step, self._check)
        training.start_updating(self.processor, step - 1 if self.options.local_copy else -1)
        fault, self.fails_in_update = self.fails_in_update, None
        if fault is not None:
            raise fault
        self.processor.updates.end(step)
        self.step = step
        training.pause_train(self.processor, step)
