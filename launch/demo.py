"""The demonstration: train, lose a rank, see the dying-gasp checkpoint, resume, compare with an unbroken run.

    python -m mindio_tft_patch.launch.demo [--text FILE] [--steps N] [--rank R]

Three jobs of four ranks with real Megatron on this machine's CPU, one after the other:

    unbroken    trains to the end
    killed      the same, in another folder; one rank gets SIGKILL at a random moment of a step
    resumed     the same command again

The exit code is 0 when no step was lost and both trainings end with the same bits, 1 when not.
"""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from rich.console import Console

from mindio_tft_patch.launch import demo_report, prepare_data
from mindio_tft_patch.launch.demo_job import RANKS, DemoError, Job, Observation, Step
from mindio_tft_patch.launch.demo_report import Findings
from mindio_tft_patch.launch.demo_view import View

DEFAULT_STEPS = 60
MIN_STEPS = 6
_TEXT_BYTES_MIN = 1024
_TEXT_BYTES_MAX = 500_000
_TRACKER = "latest_checkpointed_iteration.txt"
_MARK = ".mindio_tft_patch_demo"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration; returns the exit code."""
    options = _options(argv)
    # Without a terminal rich takes 80 columns for granted, and breaks lines that a log should keep.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    signal.signal(signal.SIGTERM, _interrupt)
    # What torch and Megatron have to say about missing GPUs would tear the display; the jobs' own output keeps it.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    began = time.monotonic()
    folder = options.out.absolute()
    try:
        _claim(folder)
        findings = _Demo(folder, options, console).run()
    except (DemoError, prepare_data.DataError, OSError) as problem:
        console.print(f"demo: {problem}", style="bold red", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("demo: interrupted; every process of the demonstration has been ended", style="yellow")
        return 130
    findings.seconds = time.monotonic() - began
    return _conclude(console, findings, folder, keep=options.keep)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="demo", description="Train, kill a rank, resume, compare.")
    parser.add_argument("--text", type=Path, metavar="FILE", help="text to train on (default: Python's documentation)")
    parser.add_argument(
        "--out", type=Path, default=Path("demo_run"), metavar="DIR", help="folder (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS, metavar="N", help="default: %(default)s")
    parser.add_argument("--rank", type=int, metavar="R", help=f"rank to kill, 0 to {RANKS - 1} (default: by chance)")
    parser.add_argument("--keep", action="store_true", help="keep data, checkpoints and logs after a success")
    options = parser.parse_args(argv)
    if options.steps < MIN_STEPS:
        parser.error(f"--steps {options.steps} is too few to kill a rank in the middle; use at least {MIN_STEPS}")
    if options.rank is not None and not 0 <= options.rank < RANKS:
        parser.error(f"--rank {options.rank} is not one of the {RANKS} ranks; use 0 to {RANKS - 1}")
    return options


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _claim(folder: Path) -> None:
    """Make the folder empty, if it is ours to empty."""
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / _MARK).exists())):
        raise DemoError(f"{folder} exists and is not of an earlier demonstration; give another folder with --out.")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / _MARK).touch()


def _conclude(console: Console, findings: Findings, folder: Path, *, keep: bool) -> int:
    demo_report.show(console, findings)
    problems = findings.problems()
    if problems:
        console.print("NOT AS PROMISED: " + "\n".join(problems), style="bold red", markup=False, soft_wrap=True)
        console.print(f"Checkpoints, output and logs are in {folder}.", markup=False, soft_wrap=True)
        return 1
    console.print(
        f"No step was lost; the resumed training equals the unbroken one bit for bit ({findings.seconds:.0f} s).",
        style="bold green",
        soft_wrap=True,
    )
    if keep:
        console.print(f"Data, checkpoints, output and logs are in {folder}.", markup=False, soft_wrap=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


class _Demo:
    """The three jobs, in a folder.

    Args:
        options: the command line.
    """

    def __init__(self, folder: Path, options: argparse.Namespace, console: Console) -> None:
        self._folder = folder
        self._text: Path | None = options.text
        self._steps: int = options.steps
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
            killed = self._job("killed", checkpoints="checkpoints")
            killed_pid, moment, checkpoint_seconds = self._kill(killed)
            resumed = self._resume()
            self._view.part("final checkpoints, bit by bit", counts_steps=False)
            last = f"iter_{self._steps:07d}"
            parts = demo_report.compare(
                self._folder / "unbroken/checkpoints" / last, self._folder / "checkpoints" / last
            )
            self._view.end_part()
        record = killed.record or {}
        return Findings(
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

    def _prepare(self) -> None:
        texts = None
        if self._text is not None:
            texts = [self._text]
            if self._text.is_file() and self._text.stat().st_size < _TEXT_BYTES_MIN:
                raise DemoError(
                    f"{self._text} is too short to train on; give at least {_TEXT_BYTES_MIN} bytes of text."
                )
        documents, size = prepare_data.prepare(self._folder / "data/text", texts, max_bytes=_TEXT_BYTES_MAX)
        self._view.end_part(f"{documents} document(s), {size:,} bytes")

    def _job(self, name: str, *, checkpoints: str) -> Job:
        return Job(
            self._folder / name,
            checkpoints=self._folder / checkpoints,
            data=self._folder / "data/text",
            steps=self._steps,
        )

    def _unbroken(self) -> Job:
        self._view.part("unbroken training")
        job = self._job("unbroken", checkpoints="unbroken/checkpoints")
        self._to_the_end(job)
        return job

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
        self._view.part(f"training; rank {self._rank} dies after step {target}")
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
        self._view.part("the same command again")
        job = self._job("resumed", checkpoints="checkpoints")
        self._to_the_end(job)
        return job


def _is_step(seen: Observation, number: int) -> bool:
    return isinstance(seen, Step) and seen.number >= number


def _evidence(job: Job) -> str:
    return f"its output is in {job.output} and ends with:\n{job.last_words()}"


if __name__ == "__main__":
    sys.exit(main())
