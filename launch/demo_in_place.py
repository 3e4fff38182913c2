"""The report of the demonstration's second act: what happened to each fault while the job stayed up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mindio_tft_patch.launch import demo_faults
from mindio_tft_patch.launch.demo_checkpoints import Part
from mindio_tft_patch.launch.drill.findings import Outcome, Recovery, Report, Verdict
from mindio_tft_patch.launch.drill.picture import COLOURS, stretches
from mindio_tft_patch.launch.drill.view import phases

_WIDTH = 60


@dataclass(frozen=True)
class InPlace:
    """What the second act has shown.

    Attributes:
        report: as a drill has it, compared with the unbroken run.
        parts: comparison of the final checkpoints.
    """

    report: Report
    parts: Sequence[Part]

    def problems(self) -> list[str]:
        """Everything that is not as promised."""
        report = self.report
        found = [f"with faults: {problem}" for problem in report.problems()]
        for outcome in report.outcomes:
            if outcome.verdict not in (Verdict.IN_PLACE, Verdict.NOT_REACHED):  # the report names the latter
                found.append(f"{demo_faults.what(outcome.fault)}: {outcome.verdict.value}, not repaired in place")
        if report.lost_steps:
            found.append(f"{report.lost_steps} completed step(s) were computed again")
        found += [
            f"after the repairs, {part.name} differ: {part.different[0]}" for part in self.parts if part.different
        ]
        return found + [f"{part.name} was not in the checkpoints" for part in self.parts if not part.numbers]


def show(console: Console, found: InPlace) -> None:
    """Print the faults, the timeline of their recoveries, and the comparison of the training log."""
    report = found.report
    table = Table(
        title="Three faults, repaired while the job stayed up", title_justify="left", title_style="bold", box=None
    )
    for name in ("fault", "repaired by", "step kept", "seconds", "steps lost"):
        table.add_column(name, justify="right" if name in ("step kept", "seconds", "steps lost") else "left")
    for outcome in report.outcomes:
        table.add_row(*_row(outcome))
    console.print(table)
    console.print()
    _show_timeline(console, report)
    if report.recoveries and all(recovery.replicas_equal for recovery in report.recoveries):
        console.print("after each repair the copies of the optimizer state were compared: equal", style="dim")
    compared = report.comparison
    if compared is not None:
        lines = f"{compared.equal} of {compared.equal + len(compared.different) + len(compared.missing)}"
        console.print(
            f"{lines} lines of its training log equal those of the unbroken run in every digit (loss, gradient norm, "
            "learning rate, samples); none came twice",
            style="dim" if not (compared.different or compared.missing or compared.repeated) else "bold red",
            soft_wrap=True,
        )


def _row(outcome: Outcome) -> list[str]:
    fault, recovery = outcome.fault, outcome.recovery
    told = f"{demo_faults.what(fault)}\n{demo_faults.when(fault)}"
    if recovery is None:
        return [told, outcome.verdict.value, "", "", ""]
    numbers = [str(recovery.step), f"{recovery.seconds:.2f}", str(recovery.recomputed_steps)]
    return [told, demo_faults.how(recovery.strategy).replace(": ", ":\n"), *numbers]


def _show_timeline(console: Console, report: Report) -> None:
    rows = [(outcome, outcome.recovery) for outcome in report.outcomes if outcome.recovery is not None]
    longest = max((_seconds(outcome, recovery) for outcome, recovery in rows), default=0.0)
    console.print("[bold]Where the seconds went[/]")
    names: dict[str, None] = {}
    for outcome, recovery in rows:
        words = Text(f"{outcome.number + 1} {recovery.strategy:<9}")
        if console.is_terminal:
            for name, seconds in stretches([outcome], recovery):
                blocks = "█" * round(seconds / longest * _WIDTH)
                words.append(blocks, COLOURS.get(name, "white"))
                if blocks:
                    names.setdefault(name)
            words.append(f" {_seconds(outcome, recovery):.2f} s")
        words.append(f"\n{'':<11}" if console.is_terminal else "", "").append(phases(recovery), "dim")
        console.print(words, soft_wrap=True)
    if console.is_terminal:
        console.print(Text.assemble(f"{'':<11}", *((f"█ {name}  ", COLOURS.get(name, "white")) for name in names)))
    console.print(
        "return: a new process is on its way · a step that was under way is computed again, from the same random "
        "numbers",
        style="dim",
        soft_wrap=True,
    )


def _seconds(outcome: Outcome, recovery: Recovery) -> float:
    """From the fault to the end of its recovery."""
    return sum(seconds for _, seconds in stretches([outcome], recovery))
