"""From SIGKILL to the next completed step, for us and for others; memory and network faults in units of a step."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench.contenders import HELD, ITERATIONS, RANKS, Contender, Ours, OursStandby, Torchrun
from bench.recovery_log import injections, phase_seconds, rebuild_seconds, records
from bench.schedule import MEMORY, NETWORK, faults, kills, rotated
from bench.step_log import Outcome, outcome_of
from bench.summary import Summary, ratio, summarize
from bench.trial import Trial, TrialError, run

# Leaves a step to be completed afterwards, whatever becomes of the one under way.
_LAST = ITERATIONS - 2
_FAULTS_OF_A_KIND_PER_JOB = 3
FAULTS = {MEMORY: "memory_fault", NETWORK: "network_fault"}


class RecoveryBench:
    """Runs the jobs of all contenders in turn.

    Args:
        folder: for the jobs; emptied as they end.
        rounds: jobs of each contender in which a rank is killed, and faults of each kind.
        contenders: those that are there.
        say: is told what is going on.

    Attributes:
        outcomes: of each contender, by round; a trial that failed is absent.
        failures: why trials failed, by contender.
        bit_equal: whether all broken jobs ended as the unbroken one.
    """

    def __init__(self, folder: Path, rounds: int, contenders: Sequence[Contender], say: Callable[[str], None]) -> None:
        self._folder = folder
        self._rounds = rounds
        self._contenders = {one.name: one for one in contenders}
        self._say = say
        self._unbroken_jobs: set[str] = set()
        self._phases: dict[str, dict[str, list[float]]] = {}
        self._rebuilds: list[float] = []
        self._faults: dict[str, list[Outcome]] = {}
        self.outcomes: dict[str, dict[int, Outcome]] = {name: {} for name in self._contenders}
        self.failures: dict[str, list[str]] = {}
        self.bit_equal: dict[str, bool] = {}

    def measure(self) -> dict[str, Summary]:
        """Everything; summaries by name, with a dot between the quantity and whose it is."""
        for name, contender in self._contenders.items():
            if contender.like == name:
                self._say(f"{name}: an unbroken job")
                self._attempt(name, lambda one=contender: self._unbroken(one))  # type: ignore[misc]
        for number, kill in enumerate(kills(self._rounds, HELD, _LAST, RANKS)):
            for name in rotated(number, list(self._contenders)):
                self._say(f"round {number + 1} of {self._rounds}: {name}")
                one = self._contenders[name]
                self._attempt(name, lambda: self._broken(one, number, run(one, self._place(one, "killed"), kill)))  # noqa: B023
        for job in range(-(-self._rounds // _FAULTS_OF_A_KIND_PER_JOB)):
            self._say(f"memory and network faults, job {job + 1}")
            self._attempt("faults", lambda: self._repaired(job))  # noqa: B023
        return self._results()

    # ---------------------------------------------------------------- jobs

    def _place(self, contender: Contender, what: str) -> Path:
        place = self._folder / f"{contender.name}-{what}"
        shutil.rmtree(place, ignore_errors=True)
        return place

    def _attempt(self, name: str, job: Callable[[], None]) -> None:
        try:
            job()
        except (TrialError, ValueError) as error:
            self.failures.setdefault(name, []).append(str(error))

    def _unbroken(self, contender: Contender) -> None:
        run(contender, self._place(contender, "unbroken"))
        self._unbroken_jobs.add(contender.name)

    def _compare(self, name: str, contender: Contender, trial: Trial) -> None:
        if contender.like not in self._unbroken_jobs:
            raise TrialError("there is no unbroken job to compare with")
        unlike = contender.unlike(self._folder / f"{contender.like}-unbroken", trial.folder)
        self.bit_equal[name] = self.bit_equal.get(name, True) and not unlike

    def _broken(self, contender: Contender, number: int, trial: Trial) -> None:
        assert trial.killed is not None
        log = trial.log()
        if problem := contender.misses(log):
            raise TrialError(problem)
        outcome = outcome_of(trial.lines(), trial.killed)
        self.outcomes[contender.name][number] = outcome
        self._compare(contender.name, contender, trial)
        for record in records(log):
            phases = self._phases.setdefault(contender.name, {})
            for phase, seconds in phase_seconds(record, outcome.seconds).items():
                phases.setdefault(phase, []).append(seconds)
        self._rebuilds += rebuild_seconds(log)

    def _repaired(self, job: int) -> None:
        ours = Ours()
        schedule, kinds = faults(job, RANKS)
        trial = run(ours, self._place(ours, "repaired"), environ={"TFT_INJECT": schedule})
        log, lines = trial.log(), trial.lines()
        found = [str(record["strategy"]) for record in records(log)]
        if found != ["retry"] * len(kinds):
            raise TrialError(f"recoveries of {schedule}: {found}")
        since_boot = time.time() - time.monotonic()
        for injection in injections(log):
            kind = FAULTS[kinds[injection.number]]
            self._faults.setdefault(kind, []).append(outcome_of(lines, injection.time - since_boot))
        self._rebuilds += rebuild_seconds(log)
        for name in FAULTS.values():
            self._compare(name, ours, trial)

    # ---------------------------------------------------------------- results

    def _results(self) -> dict[str, Summary]:
        results: dict[str, Summary] = {}

        def add(name: str, values: Sequence[float], unit: str) -> None:
            if values:
                results[name] = summarize(values, unit)

        torchrun = self.outcomes.get(Torchrun.name, {})
        for name, outcomes in self.outcomes.items():
            add(f"mttr_seconds.{name}", [one.seconds for one in outcomes.values()], "s")
            caught_up = [one.caught_up_seconds for one in outcomes.values() if one.caught_up_seconds is not None]
            add(f"caught_up_seconds.{name}", caught_up, "s")
            add(f"steps_lost.{name}", [one.steps_lost for one in outcomes.values()], "steps")
            both = sorted(set(outcomes) & set(torchrun))
            if both:
                mine, theirs = ([them[number].seconds for number in both] for them in (outcomes, torchrun))
                results[f"torchrun_vs.{name}"] = ratio(theirs, mine)
        self._add_phases("phase_seconds", OursStandby.name, add)
        self._add_phases("phase_seconds_without_standby", Ours.name, add)
        for name, repaired in self._faults.items():
            add(f"{name}_seconds", [one.seconds - one.step_seconds for one in repaired], "s")
            add(f"{name}_steps", [one.seconds / one.step_seconds for one in repaired], "steps")
        add("rebuild_groups_seconds", self._rebuilds, "s")
        return results

    def _add_phases(self, prefix: str, name: str, add: Callable[[str, Sequence[float], str], None]) -> None:
        phases: Mapping[str, Sequence[float]] = self._phases.get(name, {})
        for phase, seconds in phases.items():
            add(f"{prefix}.{phase}", seconds, "s")
