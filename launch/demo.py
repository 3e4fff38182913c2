"""The demonstration: train under faults, see them repaired, see a dying-gasp checkpoint, compare with an unbroken run.

    python -m mindio_tft_patch.launch.demo [--text FILE] [--steps N] [--rank R]

Three acts: jobs of four ranks with real Megatron on this machine's CPU, one after the other:

    1  unbroken    trains to the end
    2  in place    the same with recovery in place: a process is killed, a rank has a memory error, another one loses
                   its connections, and the job stays up
    3  killed      the same without: one rank gets SIGKILL at a random moment of a step, the others save and end
       resumed     the same command again

The exit code is 0 when no step was lost and all trainings end with the same bits, 1 when not.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from rich.console import Console

from mindio_tft_patch.launch import demo_report, prepare_data
from mindio_tft_patch.launch.demo_acts import DATA, REPORT, Demo
from mindio_tft_patch.launch.demo_job import RANKS, DemoError
from mindio_tft_patch.launch.demo_report import Findings

DEFAULT_STEPS = 40
MIN_STEPS = 8
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
        findings = Demo(folder, options, console).run()
    except (DemoError, prepare_data.DataError, OSError) as problem:
        console.print(f"demo: {problem}", style="bold red", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("demo: interrupted; every process of the demonstration has been ended", style="yellow")
        return 130
    findings.seconds = time.monotonic() - began
    return _conclude(console, findings, folder, keep=options.keep)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="demo", description="Train under faults, resume, compare with an unbroken run."
    )
    parser.add_argument("--text", type=Path, metavar="FILE", help="text to train on (default: Python's documentation)")
    parser.add_argument(
        "--out", type=Path, default=Path("demo_run"), metavar="DIR", help="folder (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS, metavar="N", help="default: %(default)s")
    parser.add_argument("--rank", type=int, metavar="R", help=f"rank to kill, 0 to {RANKS - 1} (default: by chance)")
    parser.add_argument("--keep", action="store_true", help="keep checkpoints and logs too after a success")
    options = parser.parse_args(argv)
    if options.steps < MIN_STEPS:
        parser.error(f"--steps {options.steps} is too few for three faults; use at least {MIN_STEPS}")
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
        "No step was lost; the repaired and the resumed training equal the unbroken one bit for bit "
        f"({findings.seconds:.0f} s).",
        style="bold green",
        soft_wrap=True,
    )
    console.print(f"The three repairs as a web page: {folder / REPORT}", markup=False, soft_wrap=True)
    if keep:
        console.print(f"Data, checkpoints, output and logs are in {folder}.", markup=False, soft_wrap=True)
    else:
        _leave_report(folder)
    return 0


def _leave_report(folder: Path) -> None:
    """Remove everything but the page, the data that its command to repeat it needs, and the mark by which the next
    demonstration knows the folder.
    """
    for path in folder.iterdir():
        if path.is_dir() and path.name != DATA:
            shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
