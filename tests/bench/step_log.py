"""What the written steps of a job (step_writer.py) say about a fault. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Line:
    """A rank has completed a step. began, ended: monotonic seconds. world: ranks that took part."""

    rank: int
    step: int
    world: int
    began: float
    ended: float


@dataclass(frozen=True)
class Step:
    """A step that all who took part in it have completed."""

    number: int
    world: int
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        """From the first rank's beginning to the last one's end."""
        return self.ended - self.began


@dataclass(frozen=True)
class Outcome:
    """What a fault has cost.

    seconds: from the fault to the end of the step that was completed next, whatever its number.
    caught_up_seconds: to the end of the first step that had not been completed before; None: there was none.
    steps_lost: completed steps that were computed again.
    world_before, world_after: ranks that took part in the last step before and in the next one.
    step_seconds: median step before the fault.
    """

    seconds: float
    caught_up_seconds: float | None
    steps_lost: int
    world_before: int
    world_after: int
    step_seconds: float


def read_lines(text: str) -> list[Line]:
    """Parse what a process has written; a last line that was cut off by its end is left out."""
    lines = []
    for words in map(str.split, text[: text.rfind("\n") + 1].splitlines()):
        rank, step, world = map(int, words[:3])
        began, ended = map(float, words[3:5])
        lines.append(Line(rank, step, world, began, ended))
    return lines


def complete_steps(lines: Iterable[Line]) -> list[Step]:
    """Steps that as many ranks have written as took part, by number. Of one that was computed twice, the first time."""
    by_step: dict[int, dict[int, Line]] = {}
    for line in sorted(lines, key=lambda line: line.ended):
        by_step.setdefault(line.step, {}).setdefault(line.rank, line)
    steps = []
    for number, ranks in sorted(by_step.items()):
        world = max(line.world for line in ranks.values())
        if len(ranks) >= world:
            began = min(line.began for line in ranks.values())
            steps.append(Step(number, world, began, max(line.ended for line in ranks.values())))
    return steps


def outcome_of(lines: Iterable[Line], fault: float) -> Outcome:
    """What the fault has cost that happened at this moment, in monotonic seconds.

    A step counts as one before the fault when a rank has ended it before the fault, though others may end it a little
    later; and as one after the fault when all that took part have ended it after the fault.

    Raises:
        ValueError: no step was completed before, or none after.
    """
    lines = list(lines)
    ended = {line.step for line in lines if line.ended <= fault}
    before = complete_steps(line for line in lines if line.began <= fault and line.step in ended)
    after = complete_steps(line for line in lines if line.ended > fault)
    if not before or not after:
        raise ValueError(f"no step was completed {'after' if before else 'before'} the fault")
    last = before[-1]
    following = min(after, key=lambda step: step.ended)
    new = [step.ended for step in after if step.number > last.number]
    return Outcome(
        seconds=following.ended - fault,
        caught_up_seconds=min(new) - fault if new else None,
        steps_lost=max(0, last.number - (following.number - 1)),
        world_before=last.world,
        world_after=following.world,
        step_seconds=median(step.seconds for step in before),
    )
