"""The end of the demonstration: what was lost (nothing), and whether all trainings are equal bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mindio_tft_patch.launch import demo_in_place
from mindio_tft_patch.launch.demo_checkpoints import Part
from mindio_tft_patch.launch.demo_in_place import InPlace
from mindio_tft_patch.launch.demo_job import Step

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 60
_ROWS = 8


@dataclass
class Findings:
    """What the demonstration has found.

    Attributes:
        in_place: the second act. All others: the third.
        repaired: training log of the second act, by step.
        killed: rank and process id. after: last step that had been logged when it was killed, and seconds since.
        saved_step: step of the dying-gasp checkpoint.
        resumed_at: first step of the job that was started again.
        lost: steps that had been completed and had to be trained again.
        checkpoint_seconds: from the SIGKILL to the moment at which a restart would load the new checkpoint.
        unbroken, broken: training log by step, of one job and of both parts of the other.
        parts: comparison of the final checkpoints.
    """

    in_place: InPlace
    repaired: Mapping[int, Step]
    killed: tuple[int, int]
    after: tuple[int, float]
    saved_step: int
    resumed_at: int
    lost: int
    checkpoint_seconds: float
    phase_seconds: Mapping[str, float]
    unbroken: Mapping[int, Step]
    broken: Mapping[int, Step]
    parts: Sequence[Part]
    seconds: float = 0.0
    losses_differ: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        both = sorted(self.unbroken.keys() & self.broken.keys())
        self.losses_differ = tuple(step for step in both if self.unbroken[step].loss != self.broken[step].loss)

    @property
    def unlogged(self) -> tuple[int, ...]:
        """Steps that one training log has and the other has not."""
        return tuple(sorted(self.unbroken.keys() ^ self.broken.keys()))

    def problems(self) -> list[str]:
        """Everything that is not as promised."""
        found = [f"{part.name} differ: {'; '.join(part.different[:3])}" for part in self.parts if part.different]
        found += [f"the loss of step {step} differs" for step in self.losses_differ]
        found += [f"{name} was not in the checkpoints" for name, numbers in self._sizes().items() if not numbers]
        if self.lost or self.saved_step < self.after[0]:
            found.append(f"{max(self.lost, self.after[0] - self.saved_step)} completed step(s) were lost")
        if self.resumed_at != self.saved_step + 1:
            found.append(f"the checkpoint is of step {self.saved_step}, but training resumed at step {self.resumed_at}")
        # A step may be committed and saved before Megatron has printed its line: the last one before the fault.
        if set(self.unlogged) - {self.saved_step}:
            found.append(f"steps {self.unlogged} are in one training log only")
        return [*self.in_place.problems(), *found]

    def words(self) -> list[str]:
        """What the page says beside the faults repaired in place."""
        return [
            f"The final checkpoint {_equal(self.in_place.parts)} that of a training without faults.",
            f"A second training, without the flags of recovery in place, lost rank {self.killed[0]} in step "
            f"{self.after[0] + 1}: the others wrote a checkpoint of step {self.saved_step}, and the same command went "
            f"on from it. Its final checkpoint {_equal(self.parts)} that of the training without faults.",
        ]

    def _sizes(self) -> dict[str, int]:
        return {part.name: part.numbers for part in self.parts}


def show(console: Console, findings: Findings) -> None:
    """Print the report."""
    console.print()
    demo_in_place.show(console, findings.in_place)
    console.print()
    rank, pid = findings.killed
    step, after = findings.after
    title = "Without the flags of recovery in place: a checkpoint, and a new start"
    facts = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None)
    facts.add_column(style="dim")
    facts.add_column()
    facts.add_row(
        "fault", f"rank {rank} (pid {pid}) got SIGKILL in step {step + 1}, {after:.3f} s after step {step} was logged"
    )
    facts.add_row("checkpoint", f"step {findings.saved_step}, written by the survivors")
    facts.add_row("kill to checkpoint", f"{findings.checkpoint_seconds:.2f} s ({_phases(findings.phase_seconds)})")
    facts.add_row("resumed", f"at step {findings.resumed_at}, by the same command")
    facts.add_row("steps lost", str(findings.lost))
    console.print(facts)
    console.print()
    _show_losses(console, findings)
    console.print()
    _show_checkpoints(console, findings)
    console.print()


def _show_checkpoints(console: Console, findings: Findings) -> None:
    title = "Final checkpoints, compared bit by bit with that of the unbroken training"
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    table.add_column("what", style="dim")
    table.add_column("values", justify="right")
    table.add_column("repaired in place")
    table.add_column("killed and resumed")
    for one, other in zip(findings.in_place.parts, findings.parts, strict=True):
        table.add_row(one.name, f"{one.numbers:,}", _verdict(one), _verdict(other))
    console.print(table)


def _equal(parts: Sequence[Part]) -> str:
    different = [part.name for part in parts if part.different]
    if different:
        return f"DIFFERS in {', '.join(different)} from"
    return f"equals, bit for bit in all {sum(part.numbers for part in parts):,} values,"


def _verdict(part: Part) -> Text:
    return Text(f"different: {part.different[0]}", "bold red") if part.different else Text("equal", "green")


def _phases(seconds: Mapping[str, float]) -> str:
    return "phases: " + (", ".join(f"{name} {value:.2f} s" for name, value in seconds.items()) or "not recorded")


def _show_losses(console: Console, findings: Findings) -> None:
    steps = sorted(findings.unbroken)
    shown = steps[:: max(1, -(-len(steps) // _WIDTH))]
    curves = {
        "unbroken": findings.unbroken,
        "repaired in place": findings.repaired,
        "killed and resumed": findings.broken,
    }
    losses = [float(curve[step].loss) for curve in curves.values() for step in shown if step in curve]
    low, high = min(losses), max(losses)
    console.print(f"[bold]Loss, steps {steps[0]} to {steps[-1]}[/]  [dim]({high:.3f} down to {low:.3f})[/]")
    for name, curve in curves.items():
        line = Text(f"{name:<20}", "dim")
        for step in shown:
            style = "green" if step <= findings.saved_step else "cyan"
            line.append(_bar(curve.get(step), low, high), style if curve is findings.broken else "")
        console.print(line)
    marks = "".join("↑" if step == findings.saved_step else " " for step in shown).rstrip()
    if marks:
        console.print(Text(f"{'':<20}{marks} saved after the kill: step {findings.saved_step}", "dim"))
    table = Table(box=None)
    for name in ("step", *curves, ""):
        table.add_column(name, justify="right")
    for step in steps[:: max(1, len(steps) // _ROWS)]:
        values = [curve[step].loss if step in curve else "(not printed)" for curve in curves.values()]
        same = "equal" if step not in findings.losses_differ else "DIFFERENT"
        table.add_row(str(step), *values, same)
    console.print(table)
    equal = len(findings.unbroken.keys() & findings.broken.keys()) - len(findings.losses_differ)
    note = "".join(
        f"; step {step} is trained and saved, but the kill came before its line" for step in findings.unlogged
    )
    console.print(
        f"killed and resumed: {equal} of {len(steps)} logged losses are equal to the last printed digit{note}",
        style="dim",
    )


def _bar(step: Step | None, low: float, high: float) -> str:
    if step is None:
        return " "
    share = (float(step.loss) - low) / (high - low) if high > low else 0.0
    return _BARS[round(share * (len(_BARS) - 1))]
