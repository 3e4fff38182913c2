"""The elastic agent of `ttprun`: torchelastic's, except for what happens between a fault and the end of the ranks.

torchelastic kills every rank as soon as one has died. This agent tells the controller instead, and leaves the others
alone until the controller has had the lost rank replaced (launch.in_place, launch.respawn) or the others have written
the dying-gasp checkpoint and ended, or TTP_OT has passed (launch.vigil has the rules). Rendezvous, environment, log
files, error files and restarts of the whole job stay torchelastic's. What is overridden:

    _rendezvous       afterwards: a fresh job store where needed, the controller (node 0), the agent's client
    _start_workers    afterwards: watch the processes; signals to the launcher are noted instead of raised
    _monitor_workers  a lost rank is replaced when the controller says so; a death, a command or a signal begins a vigil
                      instead of killing everybody
    _stop_workers     afterwards: this attempt's controller goes
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from mindio_tft_patch.adaptors.job_store import connect_job_store
from mindio_tft_patch.config import Config
from mindio_tft_patch.launch.control import Control, Place, open_control, with_address
from mindio_tft_patch.launch.in_place import InPlace
from mindio_tft_patch.launch.job_store import agree_on_job_store, current_attempt
from mindio_tft_patch.launch.processes import LocalProcesses
from mindio_tft_patch.launch.report import (
    Death,
    Ending,
    describe_exit,
    final_lines,
    formatted,
    recovery_lines,
    signal_name,
)
from mindio_tft_patch.launch.reserve import Reserve, standby_command, start_standby
from mindio_tft_patch.launch.respawn import Respawner, RespawnError
from mindio_tft_patch.launch.signals import NotedSignals
from mindio_tft_patch.launch.vigil import ENDING, Move, Vigil
from mindio_tft_patch.processor.guard import EXIT_CODE
from mindio_tft_patch.protocol.messages import Do
from mindio_tft_patch.protocol.phases import Strategy

log = logging.getLogger("mindio_tft_patch.launch")

# A rank that has finished its training says so before it ends; its word may take another way than ours.
_WORD_SECONDS = 2.0
# How often an undisturbed agent looks at the rendezvous for new nodes; deaths and commands wake it at once.
_IDLE_SECONDS = 0.5


class FaultTolerantAgent(LocalElasticAgent):  # type: ignore[misc]
    """LocalElasticAgent for a job that uses the plugin.

    Args:
        config: flags and variables of the job.
        standbys: processes to keep ready.
        arguments: what torchelastic's launcher passes to LocalElasticAgent.
    """

    def __init__(self, config: Config, standbys: int = 0, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.endings: list[Ending] = []
        self._config = config
        self._control: Control | None = None
        self._processes: LocalProcesses | None = None
        self._store_server: TCPStore | None = None
        self._attempts_served = 0
        self._deaths: list[Death] = []
        self._signals = NotedSignals(self._wake)
        self._standbys = standbys
        self._reserve: Reserve | None = None
        self._in_place: InPlace | None = None
        self._respawner: Respawner | None = None
        self._unstarted: set[int] = set()
        self._quiet: list[Death] = []
        self._recoveries: Counter[Strategy] = Counter()
        # torchelastic sleeps this long between two looks; our look waits by itself, and wakes up for a death.
        self._worker_group.spec.monitor_interval = 0.0

    # ------------------------------------------------------------------ torchelastic's steps

    def run(self, *arguments: Any, **named: Any) -> RunResult:
        """Run the job; the controller does not outlive it."""
        try:
            result = super().run(*arguments, **named)
        finally:
            self._close_attempt()
        if not self.endings and self._recoveries:
            sys.stderr.write(formatted(recovery_lines(self._recoveries)))
        return result

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        leads = worker_group.group_rank == 0
        if not leads and self._attempts_served == 0:
            # A launcher that was started again comes into the attempt that the others are in.
            self._remaining_restarts = max(0, worker_group.spec.max_restarts - current_attempt(worker_group.store))
        attempt = self._attempt()
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
        born = 0 if self._control is None else self._control.attempt
        pids: dict[int, int] = super()._start_workers(worker_group)
        workers = {worker.global_rank: worker for worker in worker_group.workers}
        processes = LocalProcesses({rank: pids[worker.local_rank] for rank, worker in workers.items()})
        self._processes = processes
        self._in_place = InPlace(workers, born, self._recoveries)
        self._reserve = self._open_reserve()
        self._respawner = Respawner(self._pcontext, workers, processes, self._reserve)
        self._unstarted, self._quiet = set(), []
        self._signals.take_over()
        return pids

    def _open_reserve(self) -> Reserve | None:
        context = self._pcontext
        command = standby_command(context.entrypoint, context.args[0]) if self._standbys else None
        if command is None:
            return None
        environ = {**os.environ, **context.envs[0]}
        return Reserve(self._standbys, lambda: start_standby(command, environ))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        processes, control = self._processes, self._control
        if processes is None or control is None:
            return super()._monitor_workers(worker_group)
        processes.wait(_IDLE_SECONDS)
        # Before torchelastic looks: its look kills every rank when it finds a dead one.
        ended_before = len(processes.ended)
        commands = control.commands()
        died = self._look(processes, control, commands)
        aware = control.aware()
        if died and not aware:
            # No rank uses the plugin yet, or at all: nobody could write a checkpoint. As torchrun.
            self._signals.noting = False
            return super()._monitor_workers(worker_group)
        self._signals.noting = aware
        on_command = EXIT_CODE in list(processes.ended.values())[ended_before:]
        vigil = self._begin_vigil(control, died, commands, on_command)
        if vigil is not None and not self._keep_vigil(vigil, processes, control):
            return RunResult(state=WorkerState.FAILED, failures=self._failures(processes))
        if processes.running:
            return RunResult(state=WorkerState.HEALTHY)
        self._signals.noting = False
        return super()._monitor_workers(worker_group)

    def _stop_workers(self, *arguments: Any, **named: Any) -> None:
        super()._stop_workers(*arguments, **named)
        self._close_attempt()

    # ------------------------------------------------------------------ recoveries in place

    def _look(
        self, processes: LocalProcesses, control: Control, commands: Sequence[Do], vigil: Vigil | None = None
    ) -> list[Death]:
        """Take in deaths, and replace the ranks that the controller calls lost.

        Returns:
            Ranks that have just died, and were reported if anybody can act on it.
        """
        assert self._in_place is not None
        lost = [rank for do in commands for rank in self._in_place.take(do)]
        # Whoever is replaced anyway has not died: a report would look like a death of the new process.
        died = self._take_in_deaths(processes, told={*lost, *vigil.ended} if vigil else set(lost), vigil=vigil)
        if control.aware():
            for death in (*died, *self._ended_quietly()):
                control.report_death(death.rank, describe_exit(death.code), death.pid)
        for rank in lost:
            self._restart(rank, control)
        if self._reserve is not None:
            self._reserve.tend(recovering=self._in_place.recovering or vigil is not None)
        return died

    def _restart(self, rank: int, control: Control) -> None:
        assert self._respawner is not None
        try:
            self._respawner.restart(rank)
        except RespawnError as error:
            log.error("%s", error)
            self._unstarted.add(rank)
            control.report_death(rank, str(error))
            return
        self._unstarted.discard(rank)
        self._deaths = [death for death in self._deaths if death.rank != rank]
        self._quiet = [death for death in self._quiet if death.rank != rank]

    def _missing(self, processes: LocalProcesses) -> set[int]:
        """Ranks that have died and have no new process."""
        return self._unstarted | {rank for rank, code in processes.ended.items() if code != 0}

    # ------------------------------------------------------------------ the vigil

    def _begin_vigil(
        self, control: Control, died: list[Death], commands: Sequence[Do], on_command: bool
    ) -> Vigil | None:
        """A vigil, if something has happened that may end the attempt.

        Args:
            died: ranks that have just died.
            commands: of the controller, just received.
            on_command: a rank has left because the controller said so; its command may not have come to us yet.
        """
        ordered = any(do.plan.strategy in ENDING for do in commands)
        lost = control.lost()
        if not (died or on_command or ordered or self._unstarted or self._signals.noted or lost):
            return None
        now = time.monotonic()
        vigil = Vigil(now, self._config.dump_timeout_seconds, alone=self._worker_group.group_world_size == 1)
        for do in commands:
            vigil.command(now, do)
        if lost:
            vigil.lose_controller(now, lost)
        if self._signals.noted:
            self._ask_to_terminate(control, vigil)
        return vigil

    def _keep_vigil(self, vigil: Vigil, processes: LocalProcesses, control: Control) -> bool:
        """Leave the ranks alone as long as the rules say, then end them.

        Returns:
            True when the controller has repaired the fault in place; False when all ranks have ended.
        """
        signals_seen = len(self._signals.noted)
        while not vigil.repaired(self._missing(processes)):
            commands = control.commands()
            now = time.monotonic()
            for do in commands:
                vigil.command(now, do)
            self._look(processes, control, commands, vigil)
            if lost := control.lost():
                vigil.lose_controller(now, lost)
            if len(self._signals.noted) > signals_seen:
                if len(self._signals.noted) > 1:
                    vigil.hurry(now)
                else:
                    self._ask_to_terminate(control, vigil)
                signals_seen = len(self._signals.noted)
            step = vigil.next_step(now, processes.running)
            if step.move is Move.OVER:
                self._end_vigil(vigil, processes)
                return False
            if step.move is Move.WAIT:
                if not vigil.repaired(self._missing(processes)):
                    processes.wait(min(step.until - now, _IDLE_SECONDS))
                continue
            processes.signal(step.ranks, signal.SIGTERM if step.move is Move.TERMINATE else signal.SIGKILL)
        return True

    def _end_vigil(self, vigil: Vigil, processes: LocalProcesses) -> None:
        processes.end_leftovers()
        self._signals.noting = False
        if self._signals.noted:
            self._remaining_restarts = 0  # whoever asked for the end does not want a restart
        self._tell(vigil)

    def _take_in_deaths(self, processes: LocalProcesses, told: set[int], vigil: Vigil | None) -> list[Death]:
        """Ranks that have died since the last look; not those that ended because they were told to.

        A rank that ends with exit code 0 is kept for `_ended_quietly`.
        """
        now = time.monotonic()
        verdict = vigil is not None and vigil.verdict is not None
        ended = [
            Death(rank, processes.pids[rank], code, now)
            for rank, code in sorted(processes.look().items())
            if code != EXIT_CODE and not verdict and rank not in told
        ]
        self._quiet += [death for death in ended if death.code == 0]
        died = [death for death in ended if death.code != 0]
        for death in died:
            log.error("rank %d (pid %d) %s", death.rank, death.pid, describe_exit(death.code))
        self._deaths.extend(died)
        return died

    def _ended_quietly(self) -> list[Death]:
        """Ranks whose exit code 0 is to be reported now.

        It is no fault if the rank had finished its training, which only the controller knows.
        """
        now = time.monotonic()
        due = [death for death in self._quiet if now - death.seconds >= _WORD_SECONDS]
        self._quiet = [death for death in self._quiet if death not in due]
        return due

    def _ask_to_terminate(self, control: Control, vigil: Vigil) -> None:
        vigil.ask_to_end()
        name = signal_name(self._signals.noted[0])
        patience = self._config.dump_timeout_seconds
        sys.stderr.write(
            formatted([f"received {name}: saving a checkpoint, up to {patience:g} s (again: end at once)"])
        )
        control.terminate(f"the launcher of node {self._worker_group.group_rank} received {name}")

    def _tell(self, vigil: Vigil) -> None:
        ending = Ending(
            node=self._worker_group.group_rank,
            deaths=tuple(self._deaths),
            ended_by_launcher=tuple(sorted(vigil.ended - {death.rank for death in self._deaths})),
            verdict=vigil.verdict,
            controller_lost=vigil.controller_lost,
            out_of_time=vigil.out_of_time,
            patience_seconds=self._config.dump_timeout_seconds,
            signal=self._signals.noted[0] if self._signals.noted else None,
            restarts_left=self._remaining_restarts,
            recoveries=dict(self._recoveries),
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
                pid=processes.pids.get(rank, -1),
                exitcode=code,
                error_file=files.get(local[rank], ""),
            )
            for rank, code in codes.items()
        }

    # ------------------------------------------------------------------ small things

    def _attempt(self) -> int:
        """Restarts of the job so far; ranks see it as TORCHELASTIC_RESTART_COUNT."""
        return int(self._worker_group.spec.max_restarts - self._remaining_restarts)

    def _wake(self) -> None:
        if self._processes is not None:
            self._processes.wake()

    def _close_attempt(self) -> None:
        self._signals.noting = False
        reserve, self._reserve = self._reserve, None
        if reserve is not None:
            reserve.close()
        control, self._control = self._control, None
        if control is not None:
            control.close()
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.close()
