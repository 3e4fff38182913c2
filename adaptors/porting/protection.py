"""One rank under protection: control plane, device and guard, put together (adaptation points 1, 5, 6, 9, 12).

What differs from framework to framework comes from outside, as `processor.handlers.Handlers`. In the order of use:

    protection = Protection()
    protection.start(handlers)             before torch.distributed is initialised
    ... set-up: groups, model, optimizer; nothing is loaded when protection.returning
    protection.ready(step)                 from here on this rank can be recovered
    protection.run(train)                  train() is called again after each recovery
    protection.finish()
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from mindio_tft_patch import logs
from mindio_tft_patch.adaptors.device.interface import Device, select_device
from mindio_tft_patch.adaptors.device.unconnected import Unconnected
from mindio_tft_patch.adaptors.helper_processes import end_helper_processes
from mindio_tft_patch.adaptors.job_store import open_job_store
from mindio_tft_patch.adaptors.orphans import die_with_parent
from mindio_tft_patch.adaptors.porting.in_recovery import InRecovery
from mindio_tft_patch.adaptors.porting.reconnect import reconnect, renew_tensors
from mindio_tft_patch.adaptors.refusal import tell_launcher
from mindio_tft_patch.config import HBM_FLAG, NO_REPLICA_FLAG, REBOOT_FLAG, Config, process_config
from mindio_tft_patch.controller.server import ControllerServer
from mindio_tft_patch.errors import ConfigError
from mindio_tft_patch.processor.client import Client
from mindio_tft_patch.processor.detect import Detector
from mindio_tft_patch.processor.guard import EXIT_CODE, Guard
from mindio_tft_patch.processor.handlers import Handlers, Outcome
from mindio_tft_patch.processor.progress import ProgressBoard
from mindio_tft_patch.protocol import endpoint
from mindio_tft_patch.protocol.keys import external_endpoint
from mindio_tft_patch.protocol.messages import CommitState, Plan, Ready
from mindio_tft_patch.protocol.phases import Activity, FaultKind, Strategy
from mindio_tft_patch.variables import complaints

log = logging.getLogger("mindio_tft_patch.session")

T = TypeVar("T")

RUN_FOLDER = "TFT_RUN_FOLDER"  # set by ttprun: a folder in memory, the same for all processes of a rank
_LEAVE_SECONDS = 15.0  # for user code's own clean-up after the controller has ended the job


class Protection:
    """Protection of one training process.

    Without --enable-high-availability (or HIGH_AVAILABILITY) it is not `active`: nothing is started and nothing waits.

    Args:
        config: flags and variables; default: those of this process, which then must not have another adaptor in it.
        packages: of the framework, whose modules may have taken functions of torch.distributed by name; a process that
            takes the place of a lost one answers those itself until it is connected.

    Attributes:
        board: what this rank is doing; to be told of long work (`with board.doing(Activity.SAVE)`).
        detector: what an exception means; rules of one's own are added in front (`detector.add`).
        store: the job's store, once started.
        unconnected: answers the collectives of a set-up without the other ranks.
        no_checkpoint: why no checkpoint could be loaded in place now, in words; a rank that knows sets it, and calls
            `offer` when it changes during training. Empty: nothing speaks against it.
    """

    def __init__(self, config: Config | None = None, *, packages: Iterable[str] = ("megatron",)) -> None:
        self.config = _own_config() if config is None else config
        self.board = ProgressBoard()
        self.detector = Detector()
        self.store: Any = None
        self.no_checkpoint = ""
        self.unconnected = Unconnected(packages)
        self._device: Device | None = None
        self._handlers: Handlers | None = None
        self._client: Client | None = None
        self._server: ControllerServer | None = None
        self._guard: Guard | None = None
        self._gate_group: Any = None
        self._start_step = 0
        self._is_ready = False
        self._returning = self._replaces = False
        self._leaving = False
        self._asked_to_end = False
        self._rehearsals = 0

    # What it knows.

    @property
    def active(self) -> bool:
        """The user's flags ask for protection."""
        return self.config.high_availability

    @property
    def device(self) -> Device:
        """The device of this rank."""
        assert self._device is not None, "open() or start() comes first"
        return self._device

    @property
    def client(self) -> Client | None:
        """The connection to the controller; None before start()."""
        return self._client

    @property
    def server(self) -> ControllerServer | None:
        """The controller, where it runs in this process: in rank 0 of a job without ttprun."""
        return self._server

    @property
    def guard(self) -> Guard | None:
        """The loop around the training function; None before start()."""
        return self._guard

    @property
    def handlers(self) -> Handlers:
        """The handlers as they are called in a recovery: see in_recovery.py."""
        assert self._handlers is not None, "start() comes first"
        return self._handlers

    @property
    def returning(self) -> bool:
        """This process takes the place of one that was lost while the job goes on; until it has resumed."""
        return self._returning

    @property
    def replaces(self) -> bool:
        """This process has taken the place of one that was lost; for as long as it lives."""
        return self._replaces

    @property
    def attempt(self) -> int:
        """Number of the current recovery; what is built for one (groups, temporary folders) carries it in its name."""
        return self._rehearsals + (0 if self._client is None else self._client.attempt)

    @property
    def run_folder(self) -> Path | None:
        """A folder of this node that outlives a lost process and ends with the job; None without ttprun. For Marks."""
        folder = os.environ.get(RUN_FOLDER)
        return Path(folder) if folder else None

    def offered(self) -> tuple[Strategy, ...]:
        """What the user's flags ask for: all that `Handlers.strategies` may name, if the framework can do it."""
        config = self.config
        found = [Strategy.RETRY] if config.hbmfault_repair else []
        found += [Strategy.RESPAWN] if config.worker_reboot else []
        found += [Strategy.RELOAD] if config.worker_reboot or config.no_replica else []
        return (*found, Strategy.DUMP)

    # The life of a rank.

    def open(self) -> None:
        """Begin to log and choose the device; start() does it, unless somebody needs the device before."""
        if self._device is None:
            logs.configure(self.config, role="processor", rank=self.config.rank)
            if self.config.rank == 0 and not self.config.started_by_ttprun:  # else the launcher has said it
                for complaint in complaints(os.environ):
                    log.warning("%s", complaint)
            self._device = select_device(self.config, self.board)

    def start(self, handlers: Handlers) -> None:
        """Connect to the controller (and run it, on rank 0 of a job without ttprun) before communication begins.

        Call it on the main thread. If this process is `returning`, groups that are made from here on stay unconnected
        and collectives are answered here, until the phase rebuild.

        Raises:
            ConfigError: communication cannot be rebuilt in place here, though a flag asks for it.
            ControlError: the port is in use, or the controller cannot be reached.
        """
        config = self.config
        if not self.active:
            return
        self.open()
        self._warn_of_launcher()
        store = self.store = open_job_store(config)
        if config.rank == 0 and not config.controller_external:
            self._server = ControllerServer(config, config.world_size)
            endpoint.publish(store, self._server.start())
        self._client = Client(
            config,
            external_endpoint(config) if config.controller_of_cluster else endpoint.fetch(store),
            self.board,
            rank=config.rank,
            world_size=config.world_size,
            on_stop=handlers.stop,
        )
        self._client.start()
        self._refuse_in_place()
        self._handlers = InRecovery(handlers, self.device.flag, self._resumed).as_handlers()
        self._guard = Guard(
            self._client,
            self._handlers,
            self.board,
            patience_seconds=config.dump_timeout_seconds,
            detector=self.detector,
            on_exit=self._on_exit,
            note=self.device.describe_memory_fault,
        )
        self.device.install()
        if config.started_by_ttprun:
            die_with_parent()
        # Now, so that whatever user code registers from here on still runs before it.
        atexit.register(self._end_without_tear_down)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)
        self._returning = self._replaces = self._client.returning
        if self._returning:
            self.unconnected.enter()

    def _warn_of_launcher(self) -> None:
        """One rank says that a flag cannot do here what it is there for."""
        config = self.config
        if config.worker_reboot and config.rank == 0 and not config.controller_external:
            log.warning(
                "%s: nobody starts a lost process anew without ttprun (torchrun cannot start a single rank), so one "
                "ends the job with a checkpoint, and the loss of rank 0 without. Start the job with ttprun, which "
                "takes torchrun's options",
                REBOOT_FLAG,
            )

    def _refuse_in_place(self) -> None:
        refusal = self.device.in_place_refusal() if self.config.in_place else ""
        if refusal:
            problem = ConfigError(
                f"A recovery in place was asked for, and {refusal}.",
                change=f"Remove {HBM_FLAG}, {REBOOT_FLAG} and {NO_REPLICA_FLAG}.",
            )
            tell_launcher(str(problem))
            raise problem

    def ready(self, step: int) -> None:
        """Model, optimizer and groups exist, `step` steps are complete: from here on this rank can be recovered."""
        self.board.set_commit(CommitState(step=step))
        if not self.active:
            return
        self._gate_group = self.device.gate_group()
        self._start_step = step
        self._is_ready = True
        self.offer()

    def offer(self) -> None:
        """Tell the controller, anew, which shards this rank holds and which strategies it offers."""
        assert self._client is not None
        self._client.ready(
            Ready(
                rank=self.config.rank,
                start_step=self._start_step,
                replica_sets=self.handlers.replica_sets(),
                strategies=self.handlers.strategies(),
                no_checkpoint=self.no_checkpoint,
            )
        )

    def run(self, body: Callable[[], T]) -> T:
        """Call `body` until it returns; after each fault do what the controller says.

        Raises:
            SystemExit: the controller ends the job.
            ControlError: a returning process has lost the controller.
            BaseException: body's own, when the controller cannot be reached.
        """
        if not self.active:
            return body()
        assert self._guard is not None, "start() comes first"
        self.board.enter(Activity.BETWEEN)
        return self._guard.run(lambda: self._begin(body), returning=self._returning)

    def _begin(self, body: Callable[[], T]) -> T:
        if self._asked_to_end and self._client is not None:
            self._asked_to_end = False
            self._client.report(FaultKind.TERMINATED, "SIGTERM, during a recovery")
        return body()

    def last_resort(self, error: BaseException) -> NoReturn:
        """A fault outside the function that can be run again: obey the controller, then leave. See Guard."""
        assert self._guard is not None, "start() comes first"
        self._guard.last_resort(error)

    def boundary(self, step: int) -> None:
        """Between two steps, before another is begun: hold when the controller says so.

        It is also the moment "between" of a drill.

        Args:
            step: last completed step.

        Raises:
            Interrupted: the controller stops training.
        """
        if self._guard is not None:
            self._guard.boundary(step)
        self.board.moment("boundary")

    def barrier(self) -> None:
        """Wait until all ranks are here; for the gate. Can be stopped."""
        if not self.active:
            return
        self.device.synchronize()
        with self.board.in_collective(), self.device.host_waits():
            dist.barrier(group=self._gate_group)

    def report(self, kind: FaultKind, detail: str, *, step: int | None = None) -> None:
        """Tell the controller of a fault that this rank has found; see Client.report."""
        assert self._client is not None
        self._client.report(kind, detail, step=step)

    def finish(self) -> None:
        """Training ended in good order: whatever happens to this process from now on is no fault."""
        if self._client is None:
            return
        self.board.enter(Activity.FINISHED)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._client.finished()
        self._client.close()
        self._close_server()

    # For the phases.

    def renew(self, tensors: Iterable[torch.Tensor]) -> int:
        """Phase rebuild, on a rank with a memory error: allocate the memory of these tensors anew, filled with zeros.

        Every tensor stays what it is. Returns the bytes allocated.
        """
        size = renew_tensors(tensors, self.device)
        log.warning("%d bytes of model and optimizer were allocated anew", size)
        return size

    def reconnect(self, plan: Plan) -> Outcome:
        """Phase rebuild: connect all process groups of this rank anew, together with the other ranks.

        Raises:
            RecoveryError: not all ranks of the job take part, or a group could not be connected.
        """
        return reconnect(
            plan,
            device=self.device,
            unconnected=self.unconnected,
            attempt=self.attempt,
            phase_seconds=self.config.phase_timeout_seconds,
            check=self.device.flag.check,
        )

    def rehearse(self) -> None:
        """Another recovery is rehearsed (testing.check_handlers): its groups need names that no other has used."""
        self._rehearsals += 1

    def _resumed(self) -> None:
        self._returning = False

    # The end.

    def _close_server(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if self.board.activity is Activity.RECOVERY:
            # Being saved already; or repaired, and then what was asked for is done when training goes on.
            self._asked_to_end = True
            return
        if self._client is None or not self._is_ready:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # nothing to save yet
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
            end_helper_processes()
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
        end_helper_processes()
        os._exit(EXIT_CODE)


def _own_config() -> Config:
    """The configuration of a process whose framework brings its own handlers.

    Raises:
        ConfigError: the import has patched Megatron in it.
    """
    config = process_config(os.environ)
    if config.high_availability and not config.own_handlers:
        problem = ConfigError(
            "This training script brings handlers of its own, and the plugin has patched Megatron as well.",
            change="Set TFT_ADAPTOR=own for the launcher (ttprun).",
        )
        tell_launcher(str(problem))
        raise problem
    return config
