"""The timeline of a drill as an SVG picture: the job above, every recovery enlarged below. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from mindio_tft_patch.launch.drill.findings import Outcome, Recovery, Report

COLOURS = {
    "noticing": "#c9ced6",
    "deciding": "#9aa3af",
    "stop": "#e07a5f",
    "clean": "#f2b56b",
    "rebuild": "#5b8fc9",
    "repair": "#3c9d8f",
    "rollback": "#8f79c4",
    "resume": "#74b566",
    "dump": "#3c9d8f",
    "exit": "#6b4c4c",
    "return": "#cdb38b",  # a new process is on its way
}
_OTHER = "#b0a090"
_WIDTH, _LEFT, _RIGHT = 960, 220, 60
_ROW, _BAR = 26, 16
_TOP = 46  # above the bar of the whole job
_LEAST_PIXELS = 3.0
_LABEL_PIXELS = 18.0


def timeline(report: Report) -> str:
    """The picture."""
    rows = _told(report)
    lower = 150
    height = lower + 30 + _ROW * len(rows) + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#222">',
        f"<title>{escape('Faults and recoveries along the time of the job')}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        *_whole_job(report),
        *(_enlarged(rows, lower) if rows else ()),
        *_legend(_phases_of(rows), height - 18),
        "</svg>",
    ]
    return "\n".join(parts)


def stretches(outcomes: Sequence[Outcome], recovery: Recovery) -> list[tuple[str, float]]:
    """A recovery as consecutive stretches (name, seconds), from the first of its faults to its end."""
    noticing = _noticing(outcomes, recovery)
    deciding = max(0.0, recovery.seconds - sum(recovery.phases.values()))
    return [("noticing", noticing), ("deciding", deciding), *recovery.phases.items()]


def _noticing(outcomes: Sequence[Outcome], recovery: Recovery) -> float:
    """Seconds from the first of its faults to the first report of one."""
    fired = [outcome.fired for outcome in outcomes if outcome.fired is not None]
    return max(0.0, recovery.began - min(fired, default=recovery.began))


def _told(report: Report) -> list[tuple[list[Outcome], Recovery]]:
    """Every recovery with the faults that it dealt with."""
    return [
        ([outcome for outcome in report.outcomes if outcome.recovery is recovery], recovery)
        for recovery in report.recoveries
    ]


def _phases_of(rows: Sequence[tuple[list[Outcome], Recovery]]) -> list[str]:
    names = [name for outcomes, recovery in rows for name, _ in stretches(outcomes, recovery)]
    return list(dict.fromkeys(names))


class _Scale:
    """Seconds to pixels.

    Args:
        began, ended: what is shown. zero: where the labels count from; all three on one clock, in seconds.
    """

    def __init__(self, began: float, ended: float, zero: float) -> None:
        self.began = began
        self.ended = max(ended, began + 1e-3)
        self.seconds = self.ended - began
        self._zero = zero

    def __call__(self, moment: float) -> float:
        return _LEFT + (moment - self.began) / self.seconds * (_WIDTH - _LEFT - _RIGHT)

    def width(self, seconds: float) -> float:
        """Pixels of a duration."""
        return seconds / self.seconds * (_WIDTH - _LEFT - _RIGHT)

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Positions and labels of round numbers of seconds."""
        pace = nice(self.seconds / 8)
        first = math.ceil((self.began - self._zero) / pace - 1e-9)
        last = math.floor((self.ended - self._zero) / pace + 1e-9)
        for number in range(first, last + 1):
            yield self(self._zero + number * pace), f"{number * pace:.10g} s"


def nice(raw: float) -> float:
    """The next of 1, 2, 5 times a power of ten that is not less."""
    power = 10.0 ** math.floor(math.log10(raw))
    return next((factor * power for factor in (1, 2, 5) if factor * power >= raw * 0.999999), 10 * power)


def _text(x: float, y: float, words: str, **attributes: str) -> str:
    told = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:.1f}" y="{y:.1f}"{told}>{escape(words)}</text>'


def _whole_job(report: Report) -> Iterator[str]:
    yield _text(0, 18, "The job, without its first set-up", font_weight="bold", font_size="14")
    if not report.runs:
        return
    scale = _Scale(*_shown(report), zero=report.runs[0].began)
    yield _text(0, _TOP + 12, "training")
    for run in report.runs:
        began, ended = max(run.began, scale.began), min(run.ended, scale.ended)
        if ended <= began:
            continue
        x, width = scale(began), scale.width(ended - began)
        yield f'<rect x="{x:.1f}" y="{_TOP}" width="{width:.1f}" height="{_BAR}" fill="#e8ecf1" rx="2"/>'
    for outcomes, recovery in _told(report):
        width = max(_LEAST_PIXELS, scale.width(recovery.seconds))
        longest = max(recovery.phases, key=lambda phase: recovery.phases[phase], default="deciding")
        yield _bar(scale(recovery.began), _TOP, width, longest, _label(outcomes, recovery))
        moment = recovery.began
        for name, seconds in stretches([], recovery):
            if scale.width(seconds) >= _LEAST_PIXELS:
                yield _bar(scale(moment), _TOP, scale.width(seconds), name, f"{name}: {seconds:.3f} s")
            moment += seconds
    for outcome in report.outcomes:
        if outcome.fired is not None:
            yield _marker(scale(outcome.fired), _TOP, str(outcome.number + 1), outcome.fault.words())
    yield from _steps(report, scale)
    yield from _time_axis(scale, _TOP + 62, "since the start of the job")


def _shown(report: Report) -> tuple[float, float]:
    """The time that is worth showing: without the first set-up, which is long where training is short."""
    moments = [line.seconds for run in report.runs for line in run.lines]
    moments += [outcome.fired for outcome in report.outcomes if outcome.fired is not None]
    moments += [recovery.ended for recovery in report.recoveries]
    began, ended = (min(moments), max(moments)) if moments else (report.runs[0].began, report.runs[-1].ended)
    margin = 0.02 * (ended - began)
    return max(began - margin, report.runs[0].began), min(ended + margin, report.runs[-1].ended)


def _bar(x: float, y: float, width: float, phase: str, words: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_BAR}"'
    return f'<rect {place} fill="{COLOURS.get(phase, _OTHER)}"><title>{escape(words)}</title></rect>'


def _marker(x: float, y: float, label: str, words: str) -> str:
    return (
        f'<g><title>{escape(words)}</title><path d="M {x:.1f} {y} l -5 -9 h 10 z" fill="#b3261e"/>'
        f"{_text(x, y - 12, label, text_anchor='middle', fill='#b3261e', font_size='11')}</g>"
    )


def _steps(report: Report, scale: _Scale) -> Iterator[str]:
    y = _TOP + _BAR
    yield _text(0, y + 20, "steps, when printed", fill="#555")
    labelled = -_LABEL_PIXELS
    for line in (line for run in report.runs for line in run.lines):
        x = scale(line.seconds)
        shown = x >= labelled + _LABEL_PIXELS
        labelled = x if shown else labelled
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y + 2}" y2="{y + (8 if shown else 5)}" stroke="#888"/>'
        if shown:
            yield _text(x, y + 20, str(line.step), text_anchor="middle", fill="#555", font_size="10")


def _time_axis(scale: _Scale, y: float, since: str) -> Iterator[str]:
    yield _text(0, y + 16, f"seconds {since}", fill="#555")
    yield f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}" stroke="#bbb"/>'
    for x, label in scale.ticks():
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 4}" stroke="#bbb"/>'
        yield _text(x, y + 16, label, text_anchor="middle", fill="#555", font_size="10")


def _enlarged(rows: Sequence[tuple[list[Outcome], Recovery]], top: float) -> Iterator[str]:
    yield _text(0, top + 12, "Each recovery, enlarged", font_weight="bold", font_size="14")
    # Zero is where the table begins to count: the first report. What came before it is to the left.
    before = max(_noticing(*row) for row in rows)
    scale = _Scale(-before, max(recovery.seconds for _, recovery in rows), zero=0.0)
    y = top + 26.0
    for outcomes, recovery in rows:
        yield _text(0, y + 12, _label(outcomes, recovery), font_size="11")
        moment = -_noticing(outcomes, recovery)
        for name, seconds in stretches(outcomes, recovery):
            yield _bar(scale(moment), y, max(0.5, scale.width(seconds)), name, f"{name}: {seconds:.3f} s")
            moment += seconds
        yield _text(scale(moment) + 5, y + 12, f"{recovery.seconds:.2f} s", fill="#555", font_size="10")
        y += _ROW
    yield from _time_axis(scale, y, "since the first report")


def _label(outcomes: Sequence[Outcome], recovery: Recovery) -> str:
    numbers = ", ".join(str(outcome.number + 1) for outcome in outcomes)
    kinds = ", ".join(dict.fromkeys(outcome.fault.kind for outcome in outcomes))
    label = f"{numbers}  {kinds}: {recovery.strategy}" if outcomes else recovery.strategy
    return label if len(label) <= 36 else f"{label[:35]}…"


def _legend(names: Sequence[str], y: float) -> Iterator[str]:
    x = float(_LEFT)
    for name in names:
        yield f'<rect x="{x:.0f}" y="{y - 9:.0f}" width="10" height="10" fill="{COLOURS.get(name, _OTHER)}"/>'
        yield _text(x + 14, y, name, font_size="11")
        x += 24 + 7 * len(name)
