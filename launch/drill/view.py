"""The report of a drill on the terminal, and as data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mindio_tft_patch.launch.drill.findings import GOOD, Outcome, Recovery, Report, Verdict

# Times as in the picture: "at" counts from the start of the job, "seconds" from the first report of the fault.
COLUMNS = ("", "rank", "step", "moment", "kind", "at (s)", "the job", "seconds", "recomputed", "attempts", "replicas")
_NUMBERS = frozenset({"", "rank", "step", "at (s)", "seconds", "recomputed", "attempts"})
_REPLICAS = {True: "equal", False: "DIFFERENT", None: "not checked"}


def replicas(recovery: Recovery | None) -> str:
    """Were the copies of the optimizer state compared after the recovery?"""
    return _REPLICAS[None if recovery is None else recovery.replicas_equal]


def phases(recovery: Recovery | None) -> str:
    """Seconds in each phase, in words."""
    if recovery is None:
        return ""
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in recovery.phases.items())


def when(report: Report, outcome: Outcome) -> str:
    """When a fault happened: seconds since the start of the job."""
    if outcome.fired is None or not report.runs:
        return "never"
    return f"{outcome.fired - report.runs[0].began:.1f}"


def style(verdict: Verdict) -> str:
    """Colour of a verdict."""
    return "green" if verdict in GOOD else "yellow" if verdict is Verdict.NOT_REACHED else "bold red"


def cells(report: Report, outcome: Outcome) -> list[str]:
    """A fault in a table whose columns are COLUMNS."""
    fault, recovery = outcome.fault, outcome.recovery
    place = [
        str(outcome.number + 1),
        str(fault.rank),
        "first" if fault.step == -1 else str(fault.step),
        fault.moment,
        fault.kind,
        when(report, outcome),
    ]
    if recovery is None:
        return [*place, outcome.verdict.value, "", "", "", ""]
    return [
        *place,
        f"{recovery.strategy}: {outcome.verdict.value}",
        f"{recovery.seconds:.2f}",
        str(recovery.recomputed_steps),
        str(recovery.attempts),
        replicas(recovery),
    ]


def show(console: Console, report: Report) -> None:
    """Print the report: one line a fault, then phases and reasons, then the verdict."""
    table = Table(title="What was injected, and what the job did", title_justify="left", title_style="bold", box=None)
    for name in COLUMNS:
        table.add_column(name, justify="right" if name in _NUMBERS else "left")
    for outcome in report.outcomes:
        table.add_row(*(Text(cell, style(outcome.verdict)) for cell in cells(report, outcome)))
    console.print()
    console.print(table)
    console.print()
    for recovery in report.recoveries:
        numbers = ", ".join(str(one.number + 1) for one in report.outcomes if one.recovery is recovery)
        reason = (f"\n   {recovery.reason}", "dim")
        console.print(Text.assemble(f"{numbers or '?'}: {phases(recovery)}", reason), soft_wrap=True)
    console.print()
    for sentence in report.summary():
        console.print(sentence, markup=False, soft_wrap=True)
    problems = report.problems()
    if problems:
        console.print("NOT ALL AS DOCUMENTED: " + "; ".join(problems), style="bold red", markup=False, soft_wrap=True)
    else:
        console.print("Every fault was dealt with as documented.", style="bold green", soft_wrap=True)
    console.print(f"Output, log and report.json are in {report.folder}.", style="dim", markup=False, soft_wrap=True)


def as_data(report: Report) -> dict[str, Any]:
    """The report for programs."""
    return {
        "command": report.command,
        "schedule": report.schedule,
        "again": list(report.again),
        "ok": not report.problems(),
        "problems": report.problems(),
        "summary": report.summary(),
        "lost_steps": report.lost_steps,
        "runs": [
            {"began": run.began, "ended": run.ended, "code": run.code, "signal": run.asked} for run in report.runs
        ],
        "faults": [
            {
                "fault": outcome.fault.words(),
                "fired": outcome.fired,
                "verdict": outcome.verdict.value,
                "recovery": None if outcome.recovery is None else _of_recovery(outcome.recovery),
            }
            for outcome in report.outcomes
        ],
        "comparison": None if report.comparison is None else asdict(report.comparison),
    }


def _of_recovery(recovery: Recovery) -> dict[str, Any]:
    return {**asdict(recovery), "ranks": sorted(recovery.ranks), "seconds": recovery.seconds}
