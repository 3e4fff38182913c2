"""The acts of the demonstration, one job after the other."""

from __future__ import annotations

import argparse
import random
import shlex
import statistics
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from mindio_tft_patch.launch import demo_faults, prepare_data
from mindio_tft_patch.launch.demo_checkpoints import Part, compare
from mindio_tft_patch.launch.demo_in_place import InPlace
from mindio_tft_patch.launch.demo_job import RANKS, DemoError, Job, Observation, Step, again
from mindio_tft_patch.launch.demo_report import Findings
from mindio_tft_patch.launch.demo_view import View
from mindio_tft_patch.launch.drill import findings as drill
from mindio_tft_patch.launch.drill.findings import Report
from mindio_tft_patch.launch.drill.page import page

REPORT = "report.html"
DATA = "data"
_TEXT_BYTES_MIN = 1024
_TEXT_BYTES_MAX = 500_000
_TRACKER = "latest_checkpointed_iteration.txt"


class Demo:
    """The jobs of all acts, in a folder.

    Args:
        options: the command line.
    """

    def __init__(self, folder: Path, options: argparse.Namespace, console: Console) -> None:
        self._folder = folder
        self._text: Path | None = options.text
        self._steps: int = options.steps
        self._keep: bool = options.keep
        self._rank: int = random.randrange(RANKS) if options.rank is None else options.rank
        self._view = View(console, options.steps)

    def run(self) -> Findings:
        """Run everything.

        Raises:
            DemoError: a job did not do what it should.
        """
        with self._view.shown():
            self._view.part("text as a Megatron dataset", counts_steps=False)
            self._prepare()
            unbroken = self._unbroken()
            repaired, report = self._in_place(unbroken)
            killed = self._job("killed", checkpoints="checkpoints")
            killed_pid, moment, checkpoint_seconds = self._kill(killed)
            resumed = self._resume()
            self._view.part("final checkpoints, bit by bit", counts_steps=False)
            in_place, parts = self._compared("in_place/checkpoints"), self._compared("checkpoints")
            self._view.end_part()
        record = killed.record or {}
        findings = Findings(
            in_place=InPlace(report, in_place),
            repaired=repaired.steps_seen,
            killed=(self._rank, killed_pid),
            after=moment,
            saved_step=int(record["step"]),
            resumed_at=min(resumed.steps_seen),
            lost=int(record["recomputed_steps"]),
            checkpoint_seconds=checkpoint_seconds,
            phase_seconds=record["seconds"],
            unbroken=unbroken.steps_seen,
            broken={**resumed.steps_seen, **killed.steps_seen},
            parts=parts,
        )
        self._write(replace(report, more=tuple(findings.words())))
        return findings

    def _compared(self, checkpoints: str) -> list[Part]:
        last = f"iter_{self._steps:07d}"
        return compare(self._folder / "unbroken/checkpoints" / last, self._folder / checkpoints / last)

    def _prepare(self) -> None:
        texts = None
        if self._text is not None:
            texts = [self._text]
            if self._text.is_file() and self._text.stat().st_size < _TEXT_BYTES_MIN:
                raise DemoError(
                    f"{self._text} is too short to train on; give at least {_TEXT_BYTES_MIN} bytes of text."
                )
        documents, size = prepare_data.prepare(self._folder / DATA / "text", texts, max_bytes=_TEXT_BYTES_MAX)
        self._view.end_part(f"{documents} document(s), {size:,} bytes")

    def _job(self, name: str, *, checkpoints: str, in_place: bool = False, faults: str = "") -> Job:
        return Job(
            self._folder / name,
            checkpoints=self._folder / checkpoints,
            data=self._folder / DATA / "text",
            steps=self._steps,
            in_place=in_place,
            faults=faults,
        )

    def _unbroken(self) -> Job:
        self._view.part("1 unbroken training")
        job = self._job("unbroken", checkpoints="unbroken/checkpoints")
        self._to_the_end(job)
        return job

    def _in_place(self, unbroken: Job) -> tuple[Job, Report]:
        """The same training with three faults, and what a drill makes of them."""
        self._view.part("2 three faults, repaired in place")
        faults = demo_faults.choose(self._steps, self._rank, random.Random())
        schedule = "; ".join(fault.words() for fault in faults)
        job = self._job("in_place", checkpoints="in_place/checkpoints", in_place=True, faults=schedule)
        self._to_the_end(job)
        run = job.run()
        recoveries = drill.recoveries_of(run.log)
        report = Report(
            command=shlex.join(job.command),
            schedule=schedule,
            ranks=RANKS,
            runs=(run,),
            outcomes=tuple(drill.outcomes_of(faults, job.fired.read(), [run], recoveries)),
            recoveries=tuple(recoveries),
            comparison=drill.compare(unbroken.run(), [run]),
            folder=str(job.folder) if self._keep else "removed; the option --keep keeps them",
            again=(again(schedule, self._folder / "again/checkpoints", self._folder / DATA / "text", self._steps),),
        )
        self._write(report)
        return job, report

    def _write(self, report: Report) -> None:
        (self._folder / REPORT).write_text(page(report), encoding="utf-8")

    def _to_the_end(self, job: Job) -> None:
        try:
            job.start()
            job.watch(self._view.observe)
        finally:
            job.end()
        if job.code != 0 or self._steps not in job.steps_seen:
            raise DemoError(f"the job did not train to its end (exit code {job.code}); {_evidence(job)}")

    def _kill(self, job: Job) -> tuple[int, tuple[int, float], float]:
        """Returns the process killed, the moment (last step logged, seconds since then), and seconds to checkpoint."""
        target = random.randint(max(2, self._steps * 2 // 5), max(3, self._steps * 7 // 10))
        self._view.part(f"3 no repair: rank {self._rank} dies after step {target}")
        try:
            job.start()
            if not job.watch(self._view.observe, lambda seen: _is_step(seen, target)):
                raise DemoError(f"the job ended before step {target} (exit code {job.code}); {_evidence(job)}")
            logged_at = self._random_moment(job)
            pid, killed_at = job.kill(self._rank), time.time()
            last, after = max(job.steps_seen), time.monotonic() - logged_at
            self._view.event(f"SIGKILL to rank {self._rank} (pid {pid}), {after:.3f} s after step {last}", "bold red")
            job.watch(self._view.observe)
        finally:
            job.end()
        tracker = self._folder / "checkpoints" / _TRACKER
        record = job.record
        if not job.code or record is None or record["strategy"] != "dump" or not tracker.exists():
            raise DemoError(f"no dying-gasp checkpoint was written (exit code {job.code}); {_evidence(job)}")
        self._view.end_part(f"step {record['step']} saved", complete=False)
        # The tracker is written last: from this moment on a restart loads the new checkpoint.
        return pid, (last, after), max(0.0, tracker.stat().st_mtime - killed_at)

    def _random_moment(self, job: Job) -> float:
        """Wait for a part of a step; returns when the last step was logged (monotonic seconds)."""
        logged_at = time.monotonic()
        typical_seconds = statistics.median(step.seconds for step in job.steps_seen.values())
        moment = logged_at + random.uniform(0.0, typical_seconds)
        while time.monotonic() < moment:
            for observation in job.observe():
                self._view.observe(observation)
                logged_at = time.monotonic()
            time.sleep(0.005)
        return logged_at

    def _resume(self) -> Job:
        self._view.part("  the same command again")
        job = self._job("resumed", checkpoints="checkpoints")
        self._to_the_end(job)
        return job


def _is_step(seen: Observation, number: int) -> bool:
    return isinstance(seen, Step) and seen.number >= number


def _evidence(job: Job) -> str:
    return f"its output is in {job.output} and ends with:\n{job.last_words()}"
