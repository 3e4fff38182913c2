"""One rank under the SDK: what tft_init_processor begins, tft_start_processor connects and the decorator puts to use.

    init -> start -> (the framework registers what it has) -> begin -> training -> finish

`begin` happens by itself: when the decorated function is called, or, where the processor is started inside that
function or no decorator is used, with the first update. From then on this rank can be recovered.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mindio_tft_patch import logs
from mindio_tft_patch.adaptors.device.host_wait import HostWait
from mindio_tft_patch.adaptors.orphans import die_with_parent
from mindio_tft_patch.adaptors.sdk import checks, sigterm, tls_info
from mindio_tft_patch.adaptors.sdk.accelerator import Accelerator
from mindio_tft_patch.adaptors.sdk.board import SdkBoard
from mindio_tft_patch.adaptors.sdk.callbacks import Callbacks
from mindio_tft_patch.adaptors.sdk.dump import MeetingStore
from mindio_tft_patch.adaptors.sdk.enums import ReportState
from mindio_tft_patch.adaptors.sdk.handlers import SdkHandlers
from mindio_tft_patch.adaptors.sdk.leaving import Leaving
from mindio_tft_patch.adaptors.sdk.mainline import Mainline, Report, Verdict
from mindio_tft_patch.adaptors.sdk.patterns import KINDS, RETURNED_STATES, SPREADING, Patterns
from mindio_tft_patch.adaptors.sdk.place import find_endpoint, job_store
from mindio_tft_patch.adaptors.sdk.rank_state import Options
from mindio_tft_patch.adaptors.sdk.rank_thread import NudgingClient, RankThread
from mindio_tft_patch.adaptors.sdk.replicas import alone, layouts
from mindio_tft_patch.adaptors.sdk.uce_time import UpdateTimes
from mindio_tft_patch.adaptors.sdk.updates import Updates
from mindio_tft_patch.config import Config, read_config
from mindio_tft_patch.errors import ConfigError
from mindio_tft_patch.protocol.endpoint import Endpoint
from mindio_tft_patch.protocol.messages import Ready
from mindio_tft_patch.protocol.phases import Activity, FaultKind

log = logging.getLogger("mindio_tft_patch.sdk")

_JOIN_SECONDS = 3.0


class Processor:
    """What the functions of the SDK work on; one per process.

    Args:
        environ: environment; default os.environ.
        connect: makes the client's end of the control channel, for tests.
        find: finds the controller.
        store: opens the job's store.
        accelerator: the device of this process.
        leaving: ends the process when the controller has ended the job.
        log_to: sets up the log.
    """

    def __init__(
        self,
        environ: Mapping[str, str] | None = None,
        *,
        find: Callable[[Config, str, int], Endpoint] = find_endpoint,
        store: Callable[[Config], MeetingStore] = job_store,
        client: Callable[..., NudgingClient] = NudgingClient,
        accelerator: Accelerator | None = None,
        leaving: Leaving | None = None,
        log_to: Callable[..., None] = logs.configure,
    ) -> None:
        self._environ = os.environ if environ is None else environ
        self._log_to = log_to
        self._find, self._open_store, self._make_client = find, store, client
        self.leaving = leaving or Leaving()
        self.board = SdkBoard()
        self.callbacks = Callbacks()
        self.times = UpdateTimes()
        self.patterns = Patterns(self.times)
        self.updates = Updates(self.board)
        self.mainline = Mainline()
        self.accelerator = accelerator or Accelerator()
        self.options = Options()
        self.handlers = SdkHandlers(
            self.options,
            self.callbacks,
            self.updates,
            self.mainline,
            self.accelerator,
            args=lambda: self.step_args,
            store=lambda: self._open_store(self.config),
            attempt=lambda: 0 if self._client is None else self._client.attempt,
            tell=self._tell_while_stopping,
        )
        self.step_args: Any = None
        self.framework = ""
        self._config: Config | None = None
        self._client: NudgingClient | None = None
        self._thread: RankThread | None = None
        self._offered: Ready | None = None

    # Start.

    @property
    def config(self) -> Config:
        """The configuration of this rank.

        Raises:
            ConfigError: tft_init_processor was not called.
        """
        if self._config is None:
            raise ConfigError("The processor is not initialised.", change="Call tft_init_processor first.")
        return self._config

    @property
    def started(self) -> bool:
        """The controller has been reached."""
        return self._client is not None

    @property
    def attending(self) -> bool:
        """This rank can be recovered: somebody obeys the controller."""
        return self._thread is not None

    @property
    def hosts_controller(self) -> bool:
        """The controller of this job runs in this process, unless somebody has ended it."""
        config = self._config
        return config is not None and config.rank == 0 and not config.controller_external

    @property
    def returning(self) -> bool:
        """This process takes the place of a lost one; until the job goes on."""
        return self.handlers.returning

    def init(
        self,
        *,
        rank: int,
        world_size: int,
        enable_local_copy: bool,
        enable_tls: bool,
        tls: str,
        enable_uce: bool,
        enable_arf: bool,
        enable_zit: bool,
    ) -> None:
        """tft_init_processor.

        Raises:
            ConfigError: a parameter that cannot be, or it was called before.
        """
        call = "tft_init_processor"
        if self._config is not None:
            raise ConfigError(
                f"{call}: the processor is initialised already.", change="Call tft_destroy_processor first."
            )
        size = checks.world_size(call, world_size)
        checks.rank(call, rank, size)
        switches = {"enable_local_copy": enable_local_copy, "enable_tls": enable_tls, "enable_uce": enable_uce}
        switches |= {"enable_arf": enable_arf, "enable_zit": enable_zit}
        for name, value in switches.items():
            checks.switch(call, name, value)
        # The switches of the call count here, whatever flags the training script has of its own.
        config = replace(
            read_config([], self._environ),
            rank=rank,
            world_size=size,
            high_availability=True,
            hbmfault_repair=enable_uce,
            worker_reboot=enable_arf,
        )
        tls_info.demand(call, config, enable_tls, tls)
        if enable_local_copy and config.mindspore:
            raise ConfigError(
                f"{call}: enable_local_copy=True under MindSpore.", change="Pass enable_local_copy=False."
            )
        self._log_to(config, role="processor", rank=rank)
        if enable_zit:
            log.warning("%s: enable_zit=True has no effect: training with fewer ranks is not supported", call)
        if enable_arf and rank == 0 and not config.controller_external:
            log.warning(
                "%s: enable_arf=True, but nobody starts lost processes anew, so one ends the job with a checkpoint. "
                "Start it with ttprun, and either --enable-high-availability --enable-worker-reboot behind the script "
                "or HIGH_AVAILABILITY=dump,recover (with retry for enable_uce); without them ttprun is plain torchrun",
                call,
            )
        options = self.options
        options.rank, options.enable_uce, options.enable_arf = rank, enable_uce, enable_arf
        options.mindspore, options.stops_before_dump = config.mindspore, config.stops_before_dump
        options.phase_seconds, options.dump_seconds = config.phase_timeout_seconds, config.dump_timeout_seconds
        self.patterns.retries = enable_uce
        self.updates.local_copy = enable_local_copy
        self.accelerator.remember()
        self._config = config
        self.handlers.layouts = alone(rank)

    def start(self, master_ip: str, port: int, local_ip: str) -> None:
        """tft_start_processor.

        Raises:
            ConfigError: a parameter that cannot be, or a call out of order.
            ControlError: the controller cannot be reached, or refuses.
        """
        call = "tft_start_processor"
        config = self.config
        address = checks.address(call, "master_ip", master_ip)
        checks.port(call, port)
        checks.address(call, "local_ip", local_ip, may_be_empty=True)
        if self._client is not None:
            raise ConfigError(f"{call}: the processor runs already.", change="Call it once.")
        client = self._make_client(
            config,
            self._find(config, address, port),
            self.board,
            rank=config.rank,
            world_size=config.world_size,
            on_stop=self.handlers.stop,
        )
        client.start()
        self._client = client
        self.handlers.returning = client.returning
        if config.started_by_ttprun:
            die_with_parent()
        self.leaving.close_at_exit(self.close)

    # What the framework says.

    def set_replicas(self, rank: int, replica_info: list[dict[str, Any]]) -> None:
        """tft_set_optimizer_replica.

        Raises:
            ConfigError: replica_info has not the documented form, or the rank is another one.
        """
        config = self.config
        found = layouts(
            rank,
            replica_info,
            world_size=config.world_size,
            framework_type=config.framework_type,
            mindspore=config.mindspore,
        )
        if rank != config.rank:
            raise ConfigError(
                f"tft_set_optimizer_replica: rank is {rank}, but tft_init_processor was called for rank {config.rank}.",
                change="Pass the same rank.",
            )
        self.handlers.layouts = found
        self.offer()

    def set_dp_group(self, rank: int, ranks: Any) -> None:
        """tft_set_dp_group_info.

        Raises:
            ConfigError: a parameter that cannot be.
        """
        call = "tft_set_dp_group_info"
        checks.integer(call, "rank", rank, 0, checks.WORLD_SIZE_MAX - 1)
        if not isinstance(ranks, list) or not ranks or any(type(one) is not int for one in ranks):
            raise ConfigError(f"{call}: dp_rank_list is {ranks!r}.", change="Pass a list of ranks that is not empty.")

    def set_step_args(self, args: Any) -> None:
        """What the callbacks get as `args`."""
        self.step_args = args

    def register(self, kind: str, arguments: Mapping[str, Any]) -> None:
        """One of the functions tft_register_..._handler; `arguments` by the names of its parameters.

        Raises:
            ConfigError: a parameter that cannot be.
            TypeError: what is registered cannot be called.
        """
        if kind == "exception":
            self.patterns.add(**arguments)
        elif kind == "decrypt":
            if arguments["decryptor"] is not None:
                self.callbacks.register(kind, arguments["decryptor"])
                log.info("tft_register_decrypt_handler: no private key has to be opened; it will not be called")
        else:
            self.callbacks.register(kind, arguments["func"], arguments["ctx"])
        self.offer()

    def report_loaded(self, step: int) -> None:
        """tft_report_load_ckpt_step.

        Raises:
            ConfigError: step is no step.
        """
        self.handlers.state.loaded = checks.integer("tft_report_load_ckpt_step", "step", step, 0, checks.STEP_END - 1)

    # Training.

    def begin(self) -> None:
        """From now on this rank can be recovered; does nothing before `start`, or when it has begun.

        A process that has come back begins when its training thread has arrived (`returned`).
        """
        if self._client is not None and self._thread is None and not self.returning:
            self._attend(returning=False)

    def returned(self) -> None:
        """The training thread of a process that has come back waits for what the controller says."""
        if self._client is not None and self._thread is None:
            self._attend(returning=True)

    def _attend(self, *, returning: bool) -> None:
        assert self._client is not None
        self._thread = RankThread(
            self._client,
            self.handlers,
            self.mainline,
            self.board,
            patience_seconds=self.config.dump_timeout_seconds,
            tell=self._tell,
            on_exit=self._on_exit,
        )
        if not returning:
            self.mainline.enter()
            self.board.enter(Activity.COMPUTE)
        self.board.probe_with(HostWait(threading.get_ident()))
        sigterm.catch(self.on_sigterm)
        self.offer()
        self._thread.start(returning=returning)

    def offer(self) -> None:
        """Tell the controller what this rank holds and can do; again when that has changed."""
        if self._client is None or self._thread is None:
            return
        ready = Ready(
            rank=self.config.rank,
            start_step=0,
            replica_sets=self.handlers.replica_sets(),
            strategies=self.handlers.strategies(),
            restarts=self.handlers.restarts(),
        )
        if ready != self._offered:
            self._offered = ready
            self._client.ready(ready)

    def hold(self, step: int) -> None:
        """The training thread is between two steps: hold there when the controller says so."""
        if self._thread is not None:
            self._thread.guard.boundary(step)

    def arrive(self, report: Report) -> Verdict | None:
        """The training thread has left the training function; waits for what it is to do. None: nobody can say."""
        return self.mainline.wait_for_verdict() if self.arrive_without_waiting(report) else None

    def arrive_without_waiting(self, report: Report) -> bool:
        """The training thread has left the training function. False: nobody will say what it is to do."""
        if self._client is None:
            return False
        self.mainline.arrive(report)
        if report.state in RETURNED_STATES and self.returning:
            self.returned()
        else:
            self.begin()
        if self._thread is None:  # a process that was to come back has failed in its set-up
            self._client.report(report.kind or FaultKind.EXCEPTION, report.detail)
            return False
        return True

    def finish(self) -> None:
        """Training has ended in good order: whatever happens to this process from now on is no fault."""
        client = self._client
        if client is None:
            return
        self.board.enter(Activity.FINISHED)
        self.mainline.finish()
        client.finished()
        self.close()

    def close(self) -> None:
        """End the connection; the processor can then be initialised anew."""
        client, thread = self._client, self._thread
        self._client = self._thread = self._config = self._offered = None
        if client is None:
            return
        self.mainline.finish()
        client.close()
        if thread is not None:
            thread.join(_JOIN_SECONDS)
        self.mainline.release(Verdict.ALONE)  # nobody is left to say anything else

    # On the control thread.

    def _tell(self, report: Report) -> bool:
        """Take in a report; True: the controller is to hear of it."""
        self.handlers.note(report)
        if report.state in SPREADING:
            self.offer()  # before the fault is reported: the decision depends on it
        return True

    def _tell_while_stopping(self, report: Report) -> None:
        self._tell(report)
        kind = KINDS[report.state] and report.kind
        if kind is not None and report.state is not ReportState.RS_NORMAL and self._client is not None:
            self._client.report(kind, report.detail)

    def _on_exit(self, reason: str, checkpoint: str) -> None:
        self.handlers.leave()
        self.leaving.begin()

    def on_sigterm(self) -> bool:
        """SIGTERM has come. False: it has its ordinary effect."""
        client, config = self._client, self._config
        if client is None or config is None:
            return False
        if config.controller_of_cluster:
            log.warning("SIGTERM is ignored: the cluster manager says through the controller what is to be done")
        elif self.board.activity is not Activity.RECOVERY:  # what it asks for is under way then
            sigterm.aside(lambda: client.report(FaultKind.TERMINATED, "SIGTERM"))
        return True
