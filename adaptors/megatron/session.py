"""One rank under protection: control plane, device, gate and guard, put together (adaptation point 1)."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

from mindio_tft_patch import logs
from mindio_tft_patch.adaptors.device.interface import Device, select_device
from mindio_tft_patch.adaptors.job_store import open_job_store
from mindio_tft_patch.adaptors.megatron.gate import CommitGate
from mindio_tft_patch.adaptors.megatron.handlers import MegatronHandlers
from mindio_tft_patch.adaptors.megatron.in_place import InPlace
from mindio_tft_patch.adaptors.megatron.log_state import LogState
from mindio_tft_patch.adaptors.megatron.training_objects import Training
from mindio_tft_patch.adaptors.orphans import die_with_parent
from mindio_tft_patch.adaptors.refusal import tell_launcher
from mindio_tft_patch.config import HBM_FLAG, NO_REPLICA_FLAG, REBOOT_FLAG, Config
from mindio_tft_patch.controller.server import ControllerServer
from mindio_tft_patch.errors import ConfigError
from mindio_tft_patch.processor.client import Client
from mindio_tft_patch.processor.detect import Detector
from mindio_tft_patch.processor.guard import EXIT_CODE, Guard
from mindio_tft_patch.processor.progress import ProgressBoard
from mindio_tft_patch.protocol import endpoint
from mindio_tft_patch.protocol.messages import CommitState, Ready
from mindio_tft_patch.protocol.phases import Activity, FaultKind

log = logging.getLogger("mindio_tft_patch.session")

_LEAVE_SECONDS = 15.0  # for user code's own clean-up after the controller has ended the job


class Session:
    """Protection of one training process. Created by install; started when Megatron initialises communication."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.board = ProgressBoard()
        self.detector = Detector()
        self.log_state = LogState()
        self.gate = CommitGate(
            self.board,
            barrier=self._barrier,
            next_step=self._next_step,
            record=self._commit,
            before_barrier=self._before_barrier,
        )
        # None in a job that only saves: nothing of it costs anything there.
        wanted = config.in_place or config.scrub_interval > 0
        self.in_place = InPlace(config, self.board, self.gate, self.log_state) if wanted else None
        self._device: Device | None = None
        self._handlers: MegatronHandlers | None = None
        self._client: Client | None = None
        self._server: ControllerServer | None = None
        self._guard: Guard | None = None
        self._gate_group: Any = None
        self._args: Any = None
        self._leaving = False
        self._start_step = 0

    @property
    def guard(self) -> Guard | None:
        """The loop around train(); None before start()."""
        return self._guard

    @property
    def returning(self) -> bool:
        """This process takes the place of one that was lost while the job goes on."""
        return self.in_place is not None and self.in_place.returning

    @property
    def training(self) -> Training | None:
        """The objects of the running train(); None before it."""
        return None if self._handlers is None else self._handlers.training

    def start(self, args: Any) -> None:
        """Connect to the controller (and run it, on rank 0 of a plain torchrun job) before communication begins.

        Raises:
            ControlError: the port is in use, or the controller cannot be reached.
        """
        config = self.config
        logs.configure(config, role="processor", rank=config.rank)
        self._args = args
        self._device = select_device(config, self.board)
        self._handlers = MegatronHandlers(
            board=self.board,
            device=self._device,
            gate=self.gate,
            log_state=self.log_state,
            in_place=self.in_place,
            rank=config.rank,
            attempt=lambda: 0 if self._client is None else self._client.attempt,
            dump_seconds=config.dump_timeout_seconds,
        )
        store = open_job_store(config)
        if config.rank == 0 and not config.controller_external:
            self._server = ControllerServer(config, config.world_size)
            endpoint.publish(store, self._server.start())
        self._client = Client(
            config,
            endpoint.fetch(store),
            self.board,
            rank=config.rank,
            world_size=config.world_size,
            on_stop=self._handlers.stop,
        )
        self._client.start()
        self._begin_in_place(store)
        self._guard = Guard(
            self._client,
            self._handlers,
            self.board,
            patience_seconds=config.dump_timeout_seconds,
            detector=self.detector,
            on_exit=self._on_exit,
            note=self._device.describe_memory_fault,
        )
        self._device.install()
        if config.started_by_ttprun:
            die_with_parent()
        # Now, so that whatever user code registers from here on still runs before it.
        atexit.register(self._end_without_tear_down)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def _begin_in_place(self, store: Any) -> None:
        if self.in_place is None:
            return
        assert self._device is not None and self._client is not None
        refusal = self._device.in_place_refusal() if self.config.in_place else ""
        if refusal:
            problem = ConfigError(
                f"A recovery in place was asked for, and {refusal}.",
                change=f"Remove {HBM_FLAG}, {REBOOT_FLAG} and {NO_REPLICA_FLAG}.",
            )
            tell_launcher(str(problem))
            raise problem
        self.in_place.start(store, returning=self._client.returning)
        self.in_place.report_corruption = self._report_corruption

    def _report_corruption(self, detail: str, agreed: int) -> None:
        assert self._client is not None
        self._client.report(FaultKind.CORRUPTION, detail, step=agreed)

    def ready(self, training: Training, train_data: Any, valid_data: Any) -> None:
        """train() is about to begin with these objects and data iterators: from here on this rank can be recovered."""
        assert self._handlers is not None and self._client is not None and self._device is not None
        args = self._args = training.args
        self._start_step = args.iteration
        self._handlers.training, self._handlers.inside = training, True
        self._gate_group = self._device.gate_group()
        self.board.set_commit(CommitState(step=args.iteration))
        if self.in_place is not None:
            self.in_place.ready(training, self._handlers.replica_sets(), train_data, valid_data)
        self._tell_ready()

    def left_train(self) -> None:
        """train() has returned: it cannot be entered again, but its result can be saved."""
        assert self._handlers is not None
        self._handlers.inside = False
        if self.in_place is not None:
            self._tell_ready()

    def _tell_ready(self) -> None:
        assert self._handlers is not None and self._client is not None
        self._client.ready(
            Ready(
                rank=self.config.rank,
                start_step=self._start_step,
                replica_sets=self._handlers.replica_sets(),
                strategies=self._handlers.strategies(),
            )
        )

    def finish(self) -> None:
        """Training ended in good order: whatever happens to this process from now on is no fault."""
        if self._client is None:
            return
        self.board.enter(Activity.FINISHED)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._client.finished()
        self._client.close()
        self._close_server()

    def _close_server(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def _barrier(self) -> None:
        import torch.distributed as dist

        assert self._device is not None
        self._device.synchronize()
        with self.board.in_collective(), self._device.host_waits():
            dist.barrier(group=self._gate_group)

    def _next_step(self) -> int:
        return int(self._args.curr_iteration) + 1

    def _before_barrier(self) -> None:
        if self.in_place is not None and self._device is not None:
            with self._device.host_waits():
                self.in_place.before_barrier(self.training)

    def _commit(self, step: int, skipped: bool) -> None:
        training = self.training
        if training is not None:
            training.state.commit(step, skipped)
        if self.in_place is not None:
            self.in_place.committed(step)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if self._client is None or self.training is None or self.board.activity is Activity.RECOVERY:
            # Nothing to save yet; or being saved already, and whoever asks again means it when the work is over.
            if self.board.activity is not Activity.RECOVERY:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGTERM)
            return
        # A handler runs between two bytecodes of the main thread, which may hold the lock that a report needs.
        threading.Thread(
            target=self._client.report, args=(FaultKind.TERMINATED, "SIGTERM"), name="tft-sigterm", daemon=True
        ).start()

    def _on_exit(self, reason: str, checkpoint: str) -> None:
        """The controller has ended the job: let user code clean up, but not forever on broken communication."""

        def leave() -> None:
            time.sleep(_LEAVE_SECONDS)
            log.warning("clean-up took more than %g s; ending the process", _LEAVE_SECONDS)
            os._exit(EXIT_CODE)

        self._leaving = True
        threading.Thread(target=leave, name="tft-leave", daemon=True).start()
        self._close_server()

    def _end_without_tear_down(self) -> None:
        """At the end of the interpreter, after the controller has ended the job: skip what could wait for lost ranks.

        The destructor of a gloo group with a pending collective waits for it, up to the group's time-out.
        """
        if not self._leaving:
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(EXIT_CODE)
