"""What the demonstration shows while it works: bars and phases of the recovery; plain lines without a terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from mindio_tft_patch.fault_injection import read_schedule
from mindio_tft_patch.fired_faults import Firing
from mindio_tft_patch.launch import demo_faults
from mindio_tft_patch.launch.demo_job import LogLine, Observation, Step

_EVENTS = 16
_PLAIN_EVERY = 10  # steps between two lines without a terminal


class _Mark(SpinnerColumn):
    """Turns while a part works; then says whether it came to its end."""

    def render(self, task: Task) -> RenderableType:
        """The column of one part."""
        if task.stop_time is None:
            return super().render(task)
        return Text("✓", "green") if task.finished else Text("✗", "red")


class View:
    """Shows one part of the demonstration after the other.

    Args:
        console: where to; plain lines when it is no terminal.
        steps: steps of every job.
    """

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._began = time.monotonic()
        self._events: deque[Text] = deque(maxlen=_EVENTS)
        self._progress = Progress(
            _Mark(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._task: TaskID | None = None
        self._live: Live | None = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Keep the display up to date inside this block; it stays on the screen after it."""
        if not self._console.is_terminal:
            yield
            return
        with Live(get_renderable=self._render, console=self._console, refresh_per_second=8) as self._live:
            yield
        self._live = None

    def part(self, title: str, *, counts_steps: bool = True) -> None:
        """A new part begins."""
        self.end_part()
        total = self._steps if counts_steps else 1
        self._task = self._progress.add_task(title, total=total, note="starting ..." if counts_steps else "")
        if self._live is None:
            self._line(title)

    def end_part(self, note: str = "", *, complete: bool = True) -> None:
        """The current part is over. complete: it came to its end, not to a fault."""
        task, self._task = self._task, None
        if task is None:
            return
        self._progress.stop_task(task)
        before = str(self._progress.tasks[task].fields.get("note", ""))
        fields: dict[str, Any] = {"note": escape(note) if note else before.removesuffix(", saving ...")}
        if complete:
            fields["completed"] = self._progress.tasks[task].total
        self._progress.update(task, **fields)

    def observe(self, observation: Observation) -> None:
        """Show what a job did."""
        if isinstance(observation, Step):
            self._step(observation)
        elif isinstance(observation, LogLine):
            self._log_line(observation.fields)
        elif isinstance(observation, Firing):
            (fault,) = read_schedule(observation.words)
            self.event(f"on purpose: {demo_faults.what(fault)} {demo_faults.when(fault)}", "bold red")

    def event(self, text: str, style: str = "") -> None:
        """Show a line beside the bars."""
        stamp = f"{time.monotonic() - self._began:6.1f} s  "
        self._events.append(Text.assemble((stamp, "dim"), (text, style), no_wrap=True, overflow="ellipsis"))
        if self._live is None:
            self._line(text)

    def _step(self, step: Step) -> None:
        if self._task is not None:
            note = f"loss {float(step.loss):.4f}" + (", saving ..." if step.number == self._steps else "")
            self._progress.update(self._task, completed=step.number, note=note)
        if self._live is None and step.number % _PLAIN_EVERY == 0:
            self._line(f"step {step.number}/{self._steps}, loss {float(step.loss):.4f}")

    def _log_line(self, fields: Any) -> None:
        """Phases of a recovery, as the controller logs them."""
        if "record" in fields or ("kind" not in fields and not (fields.get("attempt") and fields.get("phase"))):
            return
        style = {"dump": "green", "exit": "yellow"}.get(fields.get("phase", ""), "red" if "kind" in fields else "cyan")
        text = " ".join(str(fields["message"]).split())
        if ": sent to rank" in text:
            return
        if fields.get("kind") == "collateral":
            text = f"rank {fields['rank_of_fault']} cannot go on: another rank does not answer"
        self.event(text if len(text) <= 110 else f"{text[:107]}...", style)

    def _line(self, text: str) -> None:
        stamp = f"[{time.monotonic() - self._began:6.1f} s] "
        self._console.print(Text(stamp + text), soft_wrap=True)

    def _render(self) -> Group:
        parts: list[Any] = [self._progress]
        if self._events:
            parts.append(Panel(Group(*self._events), title="what happens", title_align="left", border_style="dim"))
        return Group(*parts)
