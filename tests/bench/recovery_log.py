"""What the JSON logs of a job tell of its recoveries. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Fields = Mapping[str, Any]

_REBUILT = re.compile(r"^\d+ process groups rebuilt in ([\d.]+) s$")
# What is beside the phases: reports are gathered before the decision, and the fault's way to the controller, the way
# back into training and the step itself.
COLLECT, REST = "collect", "rest"


@dataclass(frozen=True)
class Injection:
    """A fault that was injected. number: place in the schedule. time: seconds since 1970."""

    number: int
    time: float


def records(lines: Iterable[Fields]) -> list[Fields]:
    """Recovery records, in order."""
    return sorted((line for line in lines if line.get("record") == "recovery"), key=lambda line: line["time"])


def injections(lines: Iterable[Fields]) -> list[Injection]:
    """Faults that were injected, in the order in which they happened."""
    found = [Injection(int(line["injected"]), float(line["time"])) for line in lines if "injected" in line]
    return sorted(found, key=lambda one: one.time)


def rebuild_seconds(lines: Iterable[Fields]) -> list[float]:
    """Seconds that the slowest rank took to rebuild all its groups, one for each recovery that did."""
    slowest: dict[int, float] = {}
    for line in lines:
        found = _REBUILT.match(str(line.get("message", "")))
        if found:
            attempt = int(line["attempt"])
            slowest[attempt] = max(slowest.get(attempt, 0.0), float(found[1]))
    return [slowest[attempt] for attempt in sorted(slowest)]


def phase_seconds(record: Fields, seconds: float) -> dict[str, float]:
    """Seconds in each phase of a recovery that took `seconds` from the fault to the end of the next step."""
    phases = {name: float(value) for name, value in record["seconds"].items()}
    in_all = float(record["seconds_in_all"])
    collect, rest = max(0.0, in_all - sum(phases.values())), max(0.0, seconds - in_all)
    return {COLLECT: collect, **phases, REST: rest}
