"""Medians of runs, and of ratios of runs that were made side by side. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Summary:
    """What is reported of one quantity.

    low, high: 95 % confidence interval of the median.
    unit: "s" (seconds), "s/s" (seconds a second), "steps", "fraction" (0.004 is 0.4 %) or "ratio" (1.0 is equal).
    """

    unit: str
    median: float
    minimum: float
    maximum: float
    low: float
    high: float
    runs: int

    def as_json(self) -> dict[str, Any]:
        """The object in bench.json."""
        return {name: round(value, 7) if isinstance(value, float) else value for name, value in asdict(self).items()}

    def shown(self) -> tuple[str, str, str, str, str]:
        """Median, interval, minimum, maximum, runs, for people."""
        texts = [_shown(value, self.unit) for value in (self.median, self.low, self.high, self.minimum, self.maximum)]
        return texts[0], f"{texts[1]} .. {texts[2]}", texts[3], texts[4], str(self.runs)


def summarize(values: Sequence[float], unit: str) -> Summary:
    """Summarize the runs of one quantity.

    Raises:
        ValueError: there are none.
    """
    if not values:
        raise ValueError("no runs to summarize")
    ordered = sorted(values)
    low, high = _interval(ordered)
    return Summary(unit, median(ordered), ordered[0], ordered[-1], low, high, len(ordered))


def overhead(with_it: Sequence[float], without: Sequence[float]) -> Summary:
    """What something costs, as a fraction, from pairs of runs that were made right after one another.

    Each pair has its own ratio, so that whatever slows the machine for longer than one pair cancels out.
    """
    return summarize([a / b - 1.0 for a, b in zip(with_it, without, strict=True)], "fraction")


def ratio(of: Sequence[float], to: Sequence[float]) -> Summary:
    """How many times as long one takes as the other, from pairs of runs."""
    return summarize([a / b for a, b in zip(of, to, strict=True)], "ratio")


def _interval(ordered: Sequence[float]) -> tuple[float, float]:
    """95 % confidence interval of the median by order statistics: no assumption on how the noise is distributed."""
    count = len(ordered)
    # The number of values below the true median is binomial(n, 1/2). Cut off at most 2.5 % at each end.
    tail, cut = 0.0, 0
    while cut < (count + 1) // 2:
        tail += math.comb(count, cut) / 2**count
        if tail > 0.025:
            break
        cut += 1
    first = max(cut - 1, 0)  # too few runs for 95 %: everything that was seen
    return ordered[first], ordered[count - 1 - first]


def _shown(value: float, unit: str) -> str:
    if unit == "fraction":
        return f"{100 * value:+.2f} %"
    if unit == "ratio":
        return f"{value:.2f} x"
    if unit == "steps":
        return f"{value:.1f} steps"
    if unit == "s/s":
        return f"{1e3 * value:.3f} ms/s"
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.3f} ms"
