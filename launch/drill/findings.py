"""What became of each fault: schedule, firings, recovery records and training log, joined. Pure."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mindio_tft_patch.fault_injection import PlannedFault
from mindio_tft_patch.fired_faults import Firing

_ITERATION = re.compile(r"iteration +(\d+)/ *\d+ \|.*")
# What differs between two runs that compute the same.
_TIMES = re.compile(r"elapsed time per iteration \(ms\): [^|]*\||throughput per GPU [^|]*\|")
_IN_PLACE = frozenset({"retry", "respawn", "reload"})


class Verdict(str, Enum):
    """What a fault led to."""

    IN_PLACE = "repaired in place"
    SAVED = "saved by a dump"
    UNHARMED = "training went on"
    LOST = "not saved"
    NOT_REACHED = "not reached"


GOOD = frozenset({Verdict.IN_PLACE, Verdict.SAVED, Verdict.UNHARMED})


@dataclass(frozen=True)
class Line:
    """A line of Megatron's training log, without times. seconds: when it was seen, since 1970."""

    step: int
    text: str
    seconds: float


@dataclass(frozen=True)
class Run:
    """One start of the training command. Times in seconds since 1970.

    code: exit code; negative for a signal. timed_out: it was ended because of --limit.
    log: lines of the JSON log that were written meanwhile.
    asked: number of the signal with which somebody has ended the drill meanwhile; 0: none came.
    """

    began: float
    ended: float
    code: int
    lines: tuple[Line, ...] = ()
    log: tuple[Mapping[str, Any], ...] = ()
    timed_out: bool = False
    asked: int = 0

    def covers(self, moment: float | None) -> bool:
        """Was it during this run? moment: seconds since 1970."""
        return moment is not None and self.began <= moment <= self.ended + 1.0


@dataclass(frozen=True)
class Recovery:
    """A recovery record. Times in seconds since 1970.

    began: first report. attempts: in this recovery.
    phases: seconds in each. replicas_equal: None: nobody has compared them.
    ranks: that reported something or were lost.
    requested: somebody has asked the whole job to end: no fault was the cause.
    """

    began: float
    ended: float
    strategy: str
    step: int
    recomputed_steps: int
    attempts: int
    phases: Mapping[str, float]
    checkpoint: str
    reason: str
    ranks: frozenset[int] = frozenset()
    replicas_equal: bool | None = None
    requested: bool = False

    @property
    def saved(self) -> bool:
        """The job was ended with a checkpoint."""
        return self.strategy == "dump" and bool(self.checkpoint)

    @property
    def seconds(self) -> float:
        """From the first report to the end."""
        return self.ended - self.began


@dataclass(frozen=True)
class Outcome:
    """A planned fault and what it led to. fired: seconds since 1970; None: it has not happened."""

    number: int
    fault: PlannedFault
    verdict: Verdict
    fired: float | None = None
    recovery: Recovery | None = None


@dataclass(frozen=True)
class Comparison:
    """Training log with faults against the one without.

    equal: number of steps whose lines are the same. different, missing, repeated: steps.
    """

    equal: int
    different: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    repeated: tuple[int, ...] = ()


@dataclass(frozen=True)
class Report:
    """Everything that a drill has found.

    Attributes:
        command: of the training, with variables in front. again: what to type to repeat all of it, a line each.
        more: sentences on what else was found, by whoever has run the drill.
    """

    command: str
    schedule: str
    ranks: int
    runs: tuple[Run, ...]
    outcomes: tuple[Outcome, ...]
    recoveries: tuple[Recovery, ...]
    comparison: Comparison | None = None
    folder: str = ""
    trouble: tuple[str, ...] = field(default=())
    again: tuple[str, ...] = ()
    more: tuple[str, ...] = ()

    @property
    def lost_steps(self) -> int:
        """Completed steps that had to be computed again."""
        return sum(recovery.recomputed_steps for recovery in self.recoveries)

    @property
    def recovery_seconds(self) -> tuple[float, ...]:
        """Duration of each recovery."""
        return tuple(recovery.seconds for recovery in self.recoveries)

    def count(self, verdict: Verdict) -> int:
        """How many faults led to it."""
        return sum(outcome.verdict is verdict for outcome in self.outcomes)

    def problems(self) -> list[str]:
        """Everything that is not as documented."""
        found = list(self.trouble)
        for outcome in self.outcomes:
            if outcome.verdict is Verdict.NOT_REACHED:
                found.append(f"fault {outcome.number + 1} has not happened: {self._why_not_reached()}")
            elif outcome.verdict not in GOOD:
                found.append(f"fault {outcome.number + 1}: {outcome.verdict.value}")
        found += [
            f"after the recovery at step {recovery.step} the replicas differ"
            for recovery in self.recoveries
            if recovery.replicas_equal is False
        ]
        return found + self._of_endings() + self._of_comparison()

    def _of_endings(self) -> list[str]:
        """Runs that have ended badly, and not by a fault of the schedule that was answered by a checkpoint."""
        found = []
        for number, run in enumerate(self.runs, 1):
            name = "the job" if len(self.runs) == 1 else f"run {number}"
            if run.asked:
                continue  # the trouble says so already
            if run.timed_out:
                found.append(f"{name} did not end within --limit and was ended")
            elif run.code != 0 and not saved_on_a_fault(run, self.outcomes):
                told = f"{name} ended with exit code {run.code}"
                if not any(outcome.verdict is Verdict.LOST and run.covers(outcome.fired) for outcome in self.outcomes):
                    reasons = [recovery.reason for recovery in self.recoveries if run.covers(recovery.ended)]
                    told += f", for which no fault of the schedule accounts{f': {reasons[-1]}' if reasons else ''}"
                found.append(told)
        return found

    def _why_not_reached(self) -> str:
        if not self.runs or self.runs[-1].asked:
            return "the drill was ended before"
        if self.runs[-1].code != 0:
            return "the job had ended before; --resume starts it again after a dump"
        return (
            "the job never came to that moment of that step on that rank (a trainer of one's own has to announce some: "
            "docs/porting.md, point 5), or found nothing to overwrite there "
            "(`was not injected` in its log)"
        )

    def _of_comparison(self) -> list[str]:
        compared = self.comparison
        if compared is None:
            return []
        found = [f"the training log of step {step} differs from the run without faults" for step in compared.different]
        found += [f"step {step} was printed more than once" for step in compared.repeated]
        if compared.missing:
            found.append(f"step(s) {', '.join(map(str, compared.missing))} are missing in the training log")
        if not compared.equal and not compared.different:
            found.append("no losses could be compared: the output of the command has no lines of iterations")
        return found

    def summary(self) -> list[str]:
        """Sentences for somebody who does not know the terms."""
        happened = [outcome for outcome in self.outcomes if outcome.fired is not None]
        said = [f"{_number(len(happened), 'fault')} of {len(self.outcomes)} planned happened to the job on purpose."]
        older = sum(outcome.verdict is Verdict.SAVED and _went_back(outcome) for outcome in self.outcomes)
        counted = (
            (self.count(Verdict.IN_PLACE), "repaired while the job stayed up"),
            (
                self.count(Verdict.SAVED) - older,
                "answered by saving the last completed step and ending the job",
            ),
            (
                older,
                "answered by saving the last step that could be trusted, an older one than the last completed one, and "
                "ending the job",
            ),
            (self.count(Verdict.UNHARMED), "survived without a repair"),
            (self.count(Verdict.LOST), "not survived: the job ended and nothing new was saved"),
        )
        parts = [f"{count} {'was' if count == 1 else 'were'} {words}" for count, words in counted if count]
        if parts:
            said.append(f"Of these, {'; '.join(parts)}.")
        if self.recoveries:
            seconds = self.recovery_seconds
            said.append(
                f"{_number(self.lost_steps, 'completed step')} had to be computed again. Dealing with a fault took "
                f"{statistics.median(seconds):.2f} s at the median and {max(seconds):.2f} s at most."
            )
        if self.comparison is not None and not self._of_comparison():
            said.append(
                f"The training is the same as without faults: all {self.comparison.equal} printed lines of the "
                "training log are equal to the last digit."
            )
        return said


def _went_back(outcome: Outcome) -> bool:
    return outcome.recovery is not None and outcome.recovery.recomputed_steps > 0


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def read_line(text: str, seconds: float) -> Line | None:
    """A line of Megatron's training log; None: it is another one."""
    found = _ITERATION.search(text)
    if found is None or "loss" not in text:
        return None
    return Line(int(found[1]), _TIMES.sub("", found[0]).strip(), seconds)


def read_log(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Lines of JSON logs, in the order of time; what is not complete is left out."""
    found = []
    for line in lines:
        try:
            fields = json.loads(line)
        except ValueError:
            continue  # the last line of a killed process
        if isinstance(fields, dict) and isinstance(fields.get("time"), (int, float)):
            found.append(fields)
    return sorted(found, key=lambda fields: float(fields["time"]))


def recoveries_of(log: Sequence[Mapping[str, Any]]) -> list[Recovery]:
    """The recoveries of one run, in the order of time. log: of that run, by time."""
    found: list[Recovery] = []
    for fields in log:
        if fields.get("record") != "recovery":
            continue
        ended = float(fields["time"])
        began = ended - float(fields["seconds_in_all"])
        suspects = [fault.get("rank") for fault in fields["fault"]]
        found.append(
            Recovery(
                began=began,
                ended=ended,
                strategy=str(fields["strategy"]),
                step=int(fields["step"]),
                recomputed_steps=int(fields["recomputed_steps"]),
                attempts=int(fields["attempts"]),
                phases=dict(fields["seconds"]),
                checkpoint=str(fields["checkpoint"]),
                reason=str(fields["reason"]),
                ranks=frozenset(rank for rank in (*suspects, *fields["ranks"]) if rank is not None),
                replicas_equal=_verified(fields, log, began, ended),
                requested=bool(fields["fault"]) and all(map(_is_request, fields["fault"])),
            )
        )
    return found


def _is_request(fault: Mapping[str, Any]) -> bool:
    return fault.get("rank") is None and fault.get("kind") == "terminated"


def _verified(record: Mapping[str, Any], log: Sequence[Mapping[str, Any]], began: float, ended: float) -> bool | None:
    told = record.get("replicas_equal")
    if isinstance(told, bool):
        return told
    said = [bool(line["verified"]) for line in log if "verified" in line and began <= float(line["time"]) <= ended]
    return all(said) if said else None


def outcomes_of(
    faults: Sequence[PlannedFault], firings: Sequence[Firing], runs: Sequence[Run], recoveries: Sequence[Recovery]
) -> list[Outcome]:
    """What became of each fault, in the order of the schedule.

    firings, recoveries: in the order of time.
    """
    found = []
    for number, fault in enumerate(faults):
        mine = [firing for firing in firings if firing.number == number]
        if not mine:
            found.append(Outcome(number, fault, Verdict.NOT_REACHED))
        for firing in mine:
            recovery = _answer(firing, faults, firings, recoveries)
            found.append(Outcome(number, fault, _verdict(firing, recovery, runs, recoveries), firing.time, recovery))
    return found


def _answer(
    firing: Firing, faults: Sequence[PlannedFault], firings: Sequence[Firing], recoveries: Sequence[Recovery]
) -> Recovery | None:
    """The recovery that dealt with a fault: the first that ended after it, unless another fault began it."""
    later = [recovery for recovery in recoveries if recovery.ended >= firing.time and not recovery.requested]
    if not later:
        return None
    recovery, rank = later[0], faults[firing.number].rank
    between = [one for one in firings if firing.time < one.time <= recovery.began]
    # A fault that was only slow is followed, much later, by one that is not.
    if any(faults[one.number].rank == rank for one in between):
        return None
    return None if between and rank not in recovery.ranks else recovery


def _verdict(firing: Firing, recovery: Recovery | None, runs: Sequence[Run], recoveries: Sequence[Recovery]) -> Verdict:
    if recovery is not None:
        if recovery.strategy in _IN_PLACE:
            return Verdict.IN_PLACE
        return Verdict.SAVED if recovery.saved else Verdict.LOST
    mine = [run for run in runs if run.began <= firing.time <= run.ended]
    # The line of the step before may be printed, and seen, after the fault; that of the step after the next may not.
    went_on = any(line.step > firing.completed + 1 for run in mine for line in run.lines)
    # Whoever asked the job to end got a checkpoint, so that the fault had done no harm until then.
    requested = any(
        one.requested and one.saved and one.ended >= firing.time and run.covers(one.ended)
        for one in recoveries
        for run in mine
    )
    finished = bool(mine) and (mine[-1].code == 0 or went_on or requested)
    return Verdict.UNHARMED if finished else Verdict.LOST


def saved_on_a_fault(run: Run, outcomes: Sequence[Outcome]) -> bool:
    """Has a fault of the schedule ended this run with a checkpoint?"""
    answers = [outcome.recovery for outcome in outcomes if outcome.recovery is not None]
    return any(recovery.saved and run.covers(recovery.ended) for recovery in answers)


def compare(without: Run, runs: Sequence[Run]) -> Comparison:
    """Compare the training logs. A step that was completed and saved just before it would have been printed, and with
    which a run ended, is not missing.
    """
    expected = {line.step: line.text for line in without.lines}
    seen: dict[int, list[str]] = {}
    for run in runs:
        for line in run.lines:
            seen.setdefault(line.step, []).append(line.text)
    saved = {recovery.step for run in runs if run.code != 0 for recovery in recoveries_of(run.log)}
    last = max(seen, default=0) if runs and runs[-1].code != 0 else max(expected, default=0)
    different = [step for step, texts in seen.items() if step in expected and set(texts) != {expected[step]}]
    return Comparison(
        equal=sum(step in expected for step in seen) - len(different),
        different=tuple(sorted(different)),
        missing=tuple(step for step in sorted(expected) if step <= last and step not in seen and step not in saved),
        repeated=tuple(sorted(step for step, texts in seen.items() if len(texts) > 1)),
    )
