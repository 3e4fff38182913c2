"""A drill from beginning to end."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from mindio_tft_patch.errors import ConfigError
from mindio_tft_patch.fired_faults import FiredFaults
from mindio_tft_patch.launch.drill import findings, job, view
from mindio_tft_patch.launch.drill.asked import Asked
from mindio_tft_patch.launch.drill.findings import Outcome, Recovery, Report, Run
from mindio_tft_patch.launch.drill.options import Drill, again, elsewhere, prepare
from mindio_tft_patch.launch.drill.page import page


def drill(options: argparse.Namespace, training: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a drill and report.

    Returns:
        The exit code: 0 when everything went as documented, 1 when not, 2 when the drill makes no sense or the command
        cannot be started, 128 and the number of the signal when a signal has ended the drill.
    """
    try:
        return _drill(prepare(options, training, environ), options, environ)
    except ConfigError as problem:
        print(f"mindio-tft: {problem}", file=sys.stderr)
        return 2


def _drill(plan: Drill, options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    # Without a terminal rich takes 80 columns for granted, and breaks lines that a log should keep.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    plan.folder.mkdir(parents=True, exist_ok=True)
    with Asked() as asked:
        report = _Drill(plan, options, environ, console, asked).run()
    (plan.folder / "report.json").write_text(json.dumps(view.as_data(report), indent=2), encoding="utf-8")
    view.show(console, report)
    if plan.html is not None:
        plan.html.parent.mkdir(parents=True, exist_ok=True)
        plan.html.write_text(page(report), encoding="utf-8")
        console.print(f"The report as a web page: {plan.html}", markup=False, soft_wrap=True)
    if asked.number:
        return 128 + asked.number
    return 1 if report.problems() else 0


class _Drill:
    """The runs of one drill."""

    def __init__(
        self,
        plan: Drill,
        options: argparse.Namespace,
        environ: Mapping[str, str],
        console: Console,
        asked: Asked,
    ) -> None:
        self._plan = plan
        self._options = options
        self._environ = environ
        self._console = console
        self._asked = asked
        self._fired = FiredFaults(plan.folder / "fired")

    def run(self) -> Report:
        """All runs, and what they have shown; fewer runs when somebody has asked the drill to end."""
        plan = self._plan
        without: Run | None = None
        if plan.compare:
            # First, so that it begins from the same checkpoint as the other one.
            self._say("training without faults, to compare with")
            folder = plan.folder / "without"
            without = self._start(elsewhere(plan.words, folder), folder, "")
        runs = self._with_faults()
        recoveries, outcomes = self._became(runs)
        comparison = None if without is None or not runs else findings.compare(without, runs)
        return Report(
            command=shlex.join([*(f"{name}={value}" for name, value in plan.variables.items()), *plan.words]),
            schedule=plan.schedule,
            ranks=plan.ranks,
            runs=tuple(runs),
            outcomes=tuple(outcomes),
            recoveries=tuple(recoveries),
            comparison=comparison,
            folder=str(plan.folder),
            trouble=tuple(self._trouble(without, runs)),
            again=again(plan, self._options, Path.cwd(), self._environ),
        )

    def _became(self, runs: Sequence[Run]) -> tuple[list[Recovery], list[Outcome]]:
        recoveries = [recovery for run in runs for recovery in findings.recoveries_of(run.log)]
        return recoveries, findings.outcomes_of(self._plan.faults, self._fired.read(), runs, recoveries)

    def _with_faults(self) -> list[Run]:
        plan, runs = self._plan, []  # type: Drill, list[Run]
        while not self._asked.number:
            self._say(f"training with {len(plan.faults)} fault(s): {plan.schedule}")
            folder = plan.folder / f"run-{len(runs) + 1}"
            runs.append(self._start(plan.words, folder, plan.schedule))
            saved = findings.saved_on_a_fault(runs[-1], self._became(runs)[1])
            # Each start has at least one fault more behind it, unless the job ends for another reason.
            if not (plan.resume and saved and runs[-1].code != 0 and len(runs) <= len(plan.faults)):
                break
        return runs

    def _start(self, words: Sequence[str], folder: Path, schedule: str) -> Run:
        plan, fired = self._plan, self._plan.folder / "fired"
        environ = job.environment(self._environ, plan.variables, folder / "logs", schedule, fired)
        logs = Path(environ["TTP_LOG_PATH"])
        return job.run(job.Start(words, environ, folder / "output.txt", logs, plan.limit_seconds), self._asked)

    def _trouble(self, without: Run | None, runs: Sequence[Run]) -> list[str]:
        found = []
        if self._asked.number:
            found.append(f"{signal.Signals(self._asked.number).name} has ended the drill before its end")
        elif without is not None and without.code != 0:
            found.append(f"the run without faults ended with exit code {without.code}")
        if runs and not self._asked.number and not any(run.log for run in runs):
            found.append(
                "no log of the plugin was found: does the script begin with `import mindio_tft_patch`, and does the "
                "command have --enable-high-availability?"
            )
        return found

    def _say(self, words: str) -> None:
        self._console.print(f"drill: {words}", style="bold", markup=False, soft_wrap=True)
