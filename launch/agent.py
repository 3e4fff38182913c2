"""The elastic agent of `ttprun`: torchelastic's, except for what happens between a fault and the end of the ranks.

torchelastic kills every rank as soon as one has died. This agent tells the controller instead, and leaves the others
alone until they have written the dying-gasp checkpoint and ended, or TTP_OT has passed (launch.vigil has the rules).
Rendezvous, environment, log files, error files and restarts stay torchelastic's. What is overridden:

    _rendezvous       afterwards: a fresh job store where needed, the controller (node 0), the agent's client
    _start_workers    afterwards: watch the processes; signals to the launcher are noted instead of raised
    _monitor_workers  a death, a command or a signal begins a vigil instead of killing everybody
    _stop_workers     afterwards: this attempt's controller goes
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from mindio_tft_patch.adaptors.job_store import connect_job_store
from mindio_tft_patch.config import Config
from mindio_tft_patch.launch.control import Control, Place, open_control, with_address
from mindio_tft_patch.launch.job_store import agree_on_job_store
from mindio_tft_patch.launch.processes import LocalProcesses
from mindio_tft_patch.launch.report import Death, Ending, describe_exit, final_lines, formatted, signal_name
from mindio_tft_patch.launch.vigil import ENDING, Move, Vigil
from mindio_tft_patch.processor.guard import EXIT_CODE

log = logging.getLogger("mindio_tft_patch.launch")

# How often an undisturbed agent looks at the rendezvous for new nodes; deaths and commands wake it at once.
_IDLE_SECONDS = 0.5

SignalHandler = Callable[[int, "FrameType | None"], Any]


class FaultTolerantAgent(LocalElasticAgent):  # type: ignore[misc]
    """LocalElasticAgent for a job that uses the plugin.

    Args:
        config: flags and variables of the job.
        arguments: what torchelastic's launcher passes to LocalElasticAgent.
    """

    def __init__(self, config: Config, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.endings: list[Ending] = []
        self._config = config
        self._control: Control | None = None
        self._processes: LocalProcesses | None = None
        self._store_server: TCPStore | None = None
        self._attempts_served = 0
        self._deaths: list[Death] = []
        self._signals: list[int] = []
        self._notes_signals = False
        self._original_handlers: dict[int, SignalHandler] = {}
        # torchelastic sleeps this long between two looks; our look waits by itself, and wakes up for a death.
        self._worker_group.spec.monitor_interval = 0.0

    # ------------------------------------------------------------------ torchelastic's steps

    def run(self, *arguments: Any, **named: Any) -> RunResult:
        """Run the job; the controller does not outlive it."""
        try:
            return super().run(*arguments, **named)
        finally:
            self._close_attempt()

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        attempt = self._attempt()
        leads = worker_group.group_rank == 0
        address, port, self._store_server = agree_on_job_store(
            worker_group.store,
            leads=leads,
            attempt=attempt,
            first=self._attempts_served == 0,
            address=worker_group.master_addr,
            port=worker_group.master_port,
        )
        worker_group.master_addr, worker_group.master_port = address, port
        self._attempts_served += 1
        self._deaths = []
        place = Place(
            node=worker_group.group_rank,
            nodes=worker_group.group_world_size,
            ranks=tuple(worker.global_rank for worker in worker_group.workers),
            world_size=worker_group.workers[0].world_size,
            address=address,
        )
        config = with_address(self._config, place, os.environ)
        self._control = open_control(config, connect_job_store(address, port, attempt), place, self._wake)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids: dict[int, int] = super()._start_workers(worker_group)
        ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        self._processes = LocalProcesses({ranks[local_rank]: pid for local_rank, pid in pids.items()})
        self._take_over_signals()
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        processes, control = self._processes, self._control
        if processes is None or control is None:
            return super()._monitor_workers(worker_group)
        processes.wait(_IDLE_SECONDS)
        # Before torchelastic looks: its look kills every rank when it finds a dead one.
        ended_before = len(processes.ended)
        died = self._take_in_deaths(processes)
        aware = control.aware()
        if died and not aware:
            # No rank uses the plugin yet, or at all: nobody could write a checkpoint. As torchrun.
            self._notes_signals = False
            return super()._monitor_workers(worker_group)
        self._notes_signals = aware
        on_command = EXIT_CODE in list(processes.ended.values())[ended_before:]
        vigil = self._begin_vigil(control, died, on_command)
        if vigil is not None:
            return self._keep_vigil(vigil, processes, control)
        if processes.running:
            return RunResult(state=WorkerState.HEALTHY)
        self._notes_signals = False
        return super()._monitor_workers(worker_group)

    def _stop_workers(self, *arguments: Any, **named: Any) -> None:
        super()._stop_workers(*arguments, **named)
        self._close_attempt()

    # ------------------------------------------------------------------ the vigil

    def _begin_vigil(self, control: Control, died: list[Death], on_command: bool) -> Vigil | None:
        """A vigil, if something has happened that ends the attempt.

        Args:
            died: ranks that have just died.
            on_command: a rank has left because the controller said so; its command may not have come to us yet.
        """
        commands = [do for do in control.commands() if do.plan.strategy in ENDING]
        lost = control.lost()
        if not (died or on_command or commands or self._signals or lost):
            return None
        now = time.monotonic()
        vigil = Vigil(now, self._config.dump_timeout_seconds, alone=self._worker_group.group_world_size == 1)
        for death in died:
            control.report_death(death.rank, describe_exit(death.code))
        for do in commands:
            vigil.command(now, do)
        if lost:
            vigil.lose_controller(now, lost)
        if self._signals:
            self._ask_to_terminate(control)
        return vigil

    def _keep_vigil(self, vigil: Vigil, processes: LocalProcesses, control: Control) -> RunResult:
        """Leave the ranks alone as long as the rules say, then end them; returns when all have ended."""
        ended_by_us: set[int] = set()
        signals_seen = len(self._signals)
        while True:
            now = time.monotonic()
            for death in self._take_in_deaths(processes, told=ended_by_us, verdict=vigil.verdict is not None):
                control.report_death(death.rank, describe_exit(death.code))
            for do in control.commands():
                vigil.command(now, do)
            if lost := control.lost():
                vigil.lose_controller(now, lost)
            if len(self._signals) > signals_seen:
                if len(self._signals) > 1:
                    vigil.hurry(now)
                else:
                    self._ask_to_terminate(control)
                signals_seen = len(self._signals)
            step = vigil.next_step(now, processes.running)
            if step.move is Move.OVER:
                break
            if step.move is Move.WAIT:
                processes.wait(min(step.until - now, _IDLE_SECONDS))
                continue
            ended_by_us |= step.ranks
            processes.signal(step.ranks, signal.SIGTERM if step.move is Move.TERMINATE else signal.SIGKILL)
        processes.end_leftovers()
        self._notes_signals = False
        if self._signals:
            self._remaining_restarts = 0  # whoever asked for the end does not want a restart
        self._tell(vigil, ended_by_us)
        return RunResult(state=WorkerState.FAILED, failures=self._failures(processes))

    def _take_in_deaths(
        self, processes: LocalProcesses, told: set[int] | None = None, verdict: bool = False
    ) -> list[Death]:
        """Ranks that have died since the last look; not those that ended because they were told to.

        A rank that ends with exit code 0 has not died: torchrun goes on too, and the controller knows whether the rank
        had finished its training.
        """
        now = time.monotonic()
        died = [
            Death(rank, processes.pids[rank], code, now)
            for rank, code in sorted(processes.look().items())
            if code not in (0, EXIT_CODE) and not verdict and rank not in (told or ())
        ]
        for death in died:
            log.error("rank %d (pid %d) %s", death.rank, death.pid, describe_exit(death.code))
        self._deaths.extend(died)
        return died

    def _ask_to_terminate(self, control: Control) -> None:
        name = signal_name(self._signals[0])
        patience = self._config.dump_timeout_seconds
        sys.stderr.write(
            formatted([f"received {name}: saving a checkpoint, up to {patience:g} s (again: end at once)"])
        )
        control.terminate(f"the launcher of node {self._worker_group.group_rank} received {name}")

    def _tell(self, vigil: Vigil, ended_by_us: set[int]) -> None:
        ending = Ending(
            node=self._worker_group.group_rank,
            deaths=tuple(self._deaths),
            ended_by_launcher=tuple(sorted(ended_by_us - {death.rank for death in self._deaths})),
            verdict=vigil.verdict,
            controller_lost=vigil.controller_lost,
            out_of_time=vigil.out_of_time,
            patience_seconds=self._config.dump_timeout_seconds,
            signal=self._signals[0] if self._signals else None,
            restarts_left=self._remaining_restarts,
        )
        self.endings.append(ending)
        sys.stderr.write(formatted(final_lines(ending)))
        sys.stderr.flush()

    def _failures(self, processes: LocalProcesses) -> dict[int, ProcessFailure]:
        """What torchelastic wants to know: the ranks that died; if none did, those that ended on command."""
        group = self._worker_group
        local = {worker.global_rank: worker.local_rank for worker in group.workers}
        codes = {death.rank: death.code for death in self._deaths} or processes.ended or {min(local): 1}
        files = getattr(self._pcontext, "error_files", {})
        return {
            rank: ProcessFailure(
                local_rank=local[rank],
                pid=processes.pids[rank],
                exitcode=code,
                error_file=files.get(local[rank], ""),
            )
            for rank, code in codes.items()
        }

    # ------------------------------------------------------------------ signals to the launcher

    def _take_over_signals(self) -> None:
        """Note signals instead of raising at once; torchelastic's handlers stay in charge outside of training."""
        self._original_handlers = {}
        for name in os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT").split(","):
            number = getattr(signal, name.strip(), None)
            original = None if number is None else signal.getsignal(number)
            if number is not None and callable(original):
                self._original_handlers[number] = original
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._notes_signals:
            self._signals.append(number)
            self._wake()
            return
        self._original_handlers[number](number, frame)

    # ------------------------------------------------------------------ small things

    def _attempt(self) -> int:
        """Restarts of the job so far; ranks see it as TORCHELASTIC_RESTART_COUNT."""
        return int(self._worker_group.spec.max_restarts - self._remaining_restarts)

    def _wake(self) -> None:
        if self._processes is not None:
            self._processes.wake()

    def _close_attempt(self) -> None:
        self._notes_signals = False
        control, self._control = self._control, None
        if control is not None:
            control.close()
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.close()
