"""A drill from beginning to end."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from mindio_tft_patch.fired_faults import FiredFaults
from mindio_tft_patch.launch.drill import findings, job, view
from mindio_tft_patch.launch.drill.findings import Report, Run
from mindio_tft_patch.launch.drill.options import Drill, elsewhere, prepare
from mindio_tft_patch.launch.drill.page import page


def drill(options: argparse.Namespace, training: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a drill and report; the exit code: 0 when everything went as documented, 1 when not, 130 on Ctrl-C.

    Raises:
        ConfigError: the drill makes no sense, or the command cannot be started.
    """
    plan = prepare(options, training, environ)
    # Without a terminal rich takes 80 columns for granted, and breaks lines that a log should keep.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    plan.folder.mkdir(parents=True, exist_ok=True)
    try:
        report = _Drill(plan, environ, console).run()
    except KeyboardInterrupt:
        console.print("drill: interrupted; the job has ended", style="yellow")
        return 130
    (plan.folder / "report.json").write_text(json.dumps(view.as_data(report), indent=2), encoding="utf-8")
    view.show(console, report)
    if plan.html is not None:
        plan.html.parent.mkdir(parents=True, exist_ok=True)
        plan.html.write_text(page(report), encoding="utf-8")
        console.print(f"The report as a web page: {plan.html}", markup=False, soft_wrap=True)
    return 1 if report.problems() else 0


class _Drill:
    """The runs of one drill."""

    def __init__(self, plan: Drill, environ: Mapping[str, str], console: Console) -> None:
        self._plan = plan
        self._environ = environ
        self._console = console
        self._fired = FiredFaults(plan.folder / "fired")

    def run(self) -> Report:
        """All runs, and what they have shown."""
        plan = self._plan
        without: Run | None = None
        if plan.compare:
            # First, so that it begins from the same checkpoint as the other one.
            self._say("training without faults, to compare with")
            folder = plan.folder / "without"
            without = self._start(elsewhere(plan.words, folder), folder, "")
        runs = self._with_faults()
        recoveries = [recovery for run in runs for recovery in findings.recoveries_of(run.log)]
        comparison = None if without is None else findings.compare(without, runs)
        return Report(
            command=shlex.join([*(f"{name}={value}" for name, value in plan.variables.items()), *plan.words]),
            schedule=plan.schedule,
            ranks=plan.ranks,
            runs=tuple(runs),
            outcomes=tuple(findings.outcomes_of(plan.faults, self._fired.read(), runs, recoveries)),
            recoveries=tuple(recoveries),
            comparison=comparison,
            folder=str(plan.folder),
            trouble=tuple(self._trouble(without, runs)),
        )

    def _with_faults(self) -> list[Run]:
        plan, runs = self._plan, []  # type: Drill, list[Run]
        while True:
            self._say(f"training with {len(plan.faults)} fault(s): {plan.schedule}")
            folder = plan.folder / f"run-{len(runs) + 1}"
            runs.append(self._start(plan.words, folder, plan.schedule))
            saved = any(one.strategy == "dump" and one.checkpoint for one in findings.recoveries_of(runs[-1].log))
            # Each start has at least one fault more behind it, unless the job ends for another reason.
            if not (plan.resume and saved and runs[-1].code != 0 and len(runs) <= len(plan.faults)):
                return runs

    def _start(self, words: Sequence[str], folder: Path, schedule: str) -> Run:
        plan, fired = self._plan, self._plan.folder / "fired"
        environ = job.environment(self._environ, plan.variables, folder / "logs", schedule, fired)
        logs = Path(environ["TTP_LOG_PATH"])
        return job.run(job.Start(words, environ, folder / "output.txt", logs, plan.limit_seconds))

    def _trouble(self, without: Run | None, runs: Sequence[Run]) -> list[str]:
        found = []
        if without is not None and without.code != 0:
            found.append(f"the run without faults ended with exit code {without.code}")
        if not any(run.log for run in runs):
            found.append(
                "no log of the plugin was found: does the script begin with `import mindio_tft_patch`, and does the "
                "command have --enable-high-availability?"
            )
        return found

    def _say(self, words: str) -> None:
        self._console.print(f"drill: {words}", style="bold", markup=False, soft_wrap=True)
