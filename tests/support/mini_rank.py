"""Ranks in threads that train in step, through a gate, without state or framework; their controller is a real one."""

from __future__ import annotations

import threading
import time

from mindio_tft_patch.config import Config
from mindio_tft_patch.errors import Interrupted
from mindio_tft_patch.processor.client import Client
from mindio_tft_patch.processor.guard import Guard
from mindio_tft_patch.processor.handlers import Outcome
from mindio_tft_patch.processor.progress import ProgressBoard
from mindio_tft_patch.protocol.endpoint import Endpoint
from mindio_tft_patch.protocol.messages import CommitState, Plan, Ready, ReplicaSet
from mindio_tft_patch.protocol.phases import Activity, FaultKind, Strategy
from mindio_tft_patch.testing import FakeHandlers

EVERYTHING = (Strategy.RETRY, Strategy.RESPAWN, Strategy.RELOAD, Strategy.DUMP)


class Gate:
    """The barrier in front of every step."""

    def __init__(self, world_size: int) -> None:
        self._changed = threading.Condition()
        self._arrived = dict.fromkeys(range(world_size), 0)

    def wait(self, rank: int, step: int, stopped: threading.Event) -> None:
        with self._changed:
            self._arrived[rank] = step
            self._changed.notify_all()
            while min(self._arrived.values()) < step:
                if stopped.is_set():
                    raise Interrupted
                self._changed.wait(0.01)


class _Handlers(FakeHandlers):
    """The state of a rank is the number of its step."""

    board: ProgressBoard
    stopped: threading.Event

    def stop(self) -> None:
        self.stopped.set()

    def arrived(self) -> None:
        self.stopped.clear()
        super().arrived()

    def commit_state(self) -> CommitState:
        return self.board.commit

    def clean(self, plan: Plan) -> Outcome:
        if self.board.commit.at_gate == plan.target_step:
            self.board.set_commit(CommitState(plan.target_step))
        return super().clean(plan)

    def rollback(self, plan: Plan) -> Outcome:
        self.board.set_commit(CommitState(plan.target_step))
        return super().rollback(plan)


class MiniRank:
    """One rank; `start` returns when it is registered and ready."""

    def __init__(
        self,
        config: Config,
        endpoint: Endpoint,
        rank: int,
        gate: Gate,
        *,
        world_size: int = 2,
        offered: tuple[Strategy, ...] = EVERYTHING,
    ) -> None:
        self.rank = rank
        self.stopped, self.ended = threading.Event(), threading.Event()
        self.board = ProgressBoard()
        self.handlers = _Handlers(
            sets=(ReplicaSet("dense", tuple(range(world_size))),), offered=offered, checkpoint="/save/iter"
        )
        self.handlers.board, self.handlers.stopped = self.board, self.stopped
        self.client = Client(config, endpoint, self.board, rank=rank, world_size=world_size, on_stop=self.handlers.stop)
        self.guard = Guard(self.client, self.handlers, self.board, patience_seconds=10)
        self.fault: BaseException | None = None
        self.code: object = None
        self._gate = gate
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def step(self) -> int:
        return self.board.commit.step

    def start(self) -> MiniRank:
        self.client.start()
        self.client.ready(Ready(self.rank, 0, self.handlers.sets, self.handlers.offered))
        self._thread.start()
        return self

    def _run(self) -> None:
        try:
            self.guard.run(self._train, returning=self.client.returning)
        except SystemExit as leaving:
            self.code = leaving.code
        except BaseException as error:
            self.code = error

    def _train(self) -> None:
        try:
            self._steps()
        except Interrupted:
            if not self.ended.is_set():
                raise

    def _steps(self) -> None:
        while not self.ended.is_set():
            fault, self.fault = self.fault, None
            if fault is not None:
                raise fault
            if self.stopped.is_set():
                raise Interrupted
            self.guard.boundary(self.step)
            self.board.enter(Activity.COMPUTE)
            following = self.step + 1
            self.board.set_commit(CommitState(self.step, at_gate=following))
            with self.board.in_collective():
                self._gate.wait(self.rank, following, self.stopped)
            self.board.set_commit(CommitState(following))
            time.sleep(0.005)

    def suffers(self, fault: BaseException) -> None:
        """Raise in training, before the next step."""
        self.fault = fault

    def reports(self, kind: FaultKind) -> None:
        self.client.report(kind, "told to")

    def dies(self) -> None:
        """Say nothing any more, from one moment to the next."""
        self.ended.set()
        self.stopped.set()
        self.client.close()

    def close(self) -> None:
        self.dies()
        self._thread.join(1.0)
