"""The matrix of faults that a job survives: which fault hits which rank when, in which job. Pure; nothing runs here.

Several cases share one job, at steps that are apart, because a job takes longer to start than to recover.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from support.matrix import DEFAULT_SEED

RANKS = 4
ITERATIONS, EVALUATE_EVERY, SAVE_EVERY = 15, 4, 5
SAVED = (5, 10, 15)
FLAGS = ("--enable-hbmfault-repair", "--enable-worker-reboot")
DEFAULT_SIZE = 62
_MOST_IN_A_JOB, _APART = 5, 2
# Hangs take as long as it takes to be sure of one; jobs of one case take a start each, and some another to resume.
_MOST_HANGS, _MOST_ALONE = 4, 3
HANG_SECONDS = 3

TOPOLOGIES: dict[str, dict[str, Any]] = {
    "dp4": {},
    "tp2dp2": {"tp": 2},
    "pp2dp2": {"pp": 2, "vpp": 2},
    "ep2dp4": {"num_experts": 4, "ep": 2},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "dropout": {"dropout": 0.1},
    "fp16": {"dtype": "fp16"},  # the first steps overflow and are skipped
    "overlap": {"overlap": True},
    "unsharded": {"distributed_optimizer": False},
    "fp32": {"dtype": "fp32"},
    "workers": {"extra": ["--num-workers", "2"]},  # forked processes, which inherit connections
}


@dataclass(frozen=True)
class Moment:
    """When a fault happens.

    inject: for the schedule, with "{step}".
    steps: at which it may be; all of them where the moment means the same.
    completed: the step is kept; else it is computed again.
    updates: it is inside an update that is made, and not skipped.
    others: schedule for other ranks, with "{step}", and "{first}" and so on for them in ascending order.
    why_the_end: the job does not go on, and why.
    """

    name: str
    inject: str
    steps: tuple[int, ...]
    completed: bool
    updates: bool = False
    others: str = ""
    why_the_end: str = ""


_STEPS = (3, 6, 7, 9, 11, 13, 14)
# A moment "loader" of the step after an evaluation is also in that evaluation.
_READING = tuple(step for step in _STEPS if (step - 1) % EVALUATE_EVERY)
_EVALUATIONS = (4, 8, 12)
# Behind the gate a fault waits until the others have left the gate as well: only then is the outcome certain.
_LATE = "delay=0.5"
_RAISES = "moment=barrier,step={step},kind=collateral"

MOMENTS: dict[str, Moment] = {
    one.name: one
    for one in (
        Moment("loader", "moment=loader,step={step}", _READING, completed=False),
        Moment("forward", "moment=forward,step={step}", _STEPS, completed=False),
        Moment("backward", "moment=backward,step={step},count=2", _STEPS, completed=False),
        Moment("before_gate", "moment=before_gate,step={step}", _STEPS, completed=False),
        Moment("after_gate", f"moment=after_gate,step={{step}},{_LATE}", _STEPS, completed=True),
        Moment("in_update", f"moment=in_update,step={{step}},{_LATE}", _STEPS, completed=True, updates=True),
        # Others begin the evaluation that follows.
        Moment("after_update", f"moment=after_update,step={{step}},{_LATE}", _EVALUATIONS, completed=True),
        Moment("gather", f"moment=gather,step={{step}},{_LATE}", _STEPS, completed=True, updates=True),
        Moment("between", "moment=between,step={step}", _STEPS, completed=True),
        # The gate's barrier completes for some and raises for others.
        Moment(
            "gate_half",
            f"moment=after_gate,step={{step}},{_LATE}",
            _STEPS,
            completed=True,
            others=f"rank={{first}},{_RAISES};rank={{third}},{_RAISES}",
        ),
        # Who passed the gate is the one with the fault: the step is computed again by all alike.
        Moment(
            "gate_lost",
            f"moment=after_gate,step={{step}},{_LATE}",
            _STEPS,
            completed=False,
            others=f"rank={{first}},{_RAISES};rank={{second}},{_RAISES};rank={{third}},{_RAISES}",
        ),
        Moment("evaluate", "moment=evaluate,step={step}", _EVALUATIONS, completed=True),
        Moment("save_begin", "moment=save_begin,step={step}", SAVED, completed=True),
        Moment("save", "moment=save,step={step}", SAVED, completed=True),
        Moment("save_end", "moment=save_end,step={step}", SAVED, completed=True),
        Moment("first_step", "moment=backward,step={step}", (1,), completed=False),
        Moment("first_update", f"moment=in_update,step={{step}},{_LATE}", (1,), completed=True, updates=True),
        Moment("second_step", "moment=forward,step={step},count=2", (2,), completed=False),
        Moment("last_step", "moment=forward,step={step}", (ITERATIONS,), completed=False),
        Moment("last_update", f"moment=after_gate,step={{step}},{_LATE}", (ITERATIONS,), completed=True),
        Moment(
            "afterwards",
            "moment=evaluate,step={step}",
            (ITERATIONS,),
            completed=True,
            why_the_end="train() has returned on ranks that are not lost, and cannot be entered again",
        ),
    )
}
_HALF_KNOWN = ("gate_half", "gate_lost")


@dataclass(frozen=True)
class Kind:
    """What happens.

    strategy: what it is mended with.
    moments: names of those at which it can be.
    refills: the rank gets its state from a replica.
    hangs: it is noticed only because nothing goes on.
    why_the_end: the job does not go on, and why.
    """

    name: str
    strategy: str
    moments: tuple[str, ...]
    refills: bool = True
    hangs: bool = False
    why_the_end: str = ""


def _all_but(*names: str) -> tuple[str, ...]:
    return tuple(name for name in MOMENTS if name not in names)


_FORWARD = ("forward", "second_step", "last_step", "evaluate")
KINDS: dict[str, Kind] = {
    one.name: one
    for one in (
        Kind("exit", "respawn", _all_but()),
        Kind("sigkill", "respawn", _all_but()),
        Kind("sigsegv", "respawn", _all_but()),
        Kind("memory_parameters", "retry", _all_but("afterwards")),
        Kind("memory_main_parameters", "retry", _all_but("afterwards")),
        Kind("memory_moments", "retry", _all_but("afterwards")),
        Kind("memory_gradients", "retry", _all_but("afterwards")),
        # Of the pass that follows.
        Kind("memory_activations", "retry", _FORWARD),
        # No state is moved. In the half-known moments the collaterals are faults of others already.
        Kind("broken_sockets", "retry", _all_but("afterwards", *_HALF_KNOWN), refills=False),
        # Before the first step five times as long is waited.
        Kind("sigstop", "respawn", _all_but("afterwards", "first_step", "first_update", *_HALF_KNOWN), hangs=True),
        Kind("block", "respawn", ("loader",), hangs=True),
        Kind(
            "exception",
            "dump",
            _all_but("afterwards", "first_step", *_HALF_KNOWN),
            why_the_end="an exception of user code would happen again",
        ),
    )
}


@dataclass(frozen=True)
class Case:
    """One combination."""

    topology: str
    variant: str
    rank: int
    kind: Kind = field(repr=False)
    moment: Moment = field(repr=False)

    @property
    def job(self) -> tuple[str, str]:
        """What an unbroken run of it depends on."""
        return self.topology, self.variant

    @property
    def name(self) -> str:
        """For test reports."""
        return f"{self.topology}-{self.variant}-{self.kind.name}-rank{self.rank}-{self.moment.name}"

    @property
    def alone(self) -> bool:
        """The job ends with it."""
        return bool(self.kind.why_the_end or self.moment.why_the_end)

    @property
    def strategy(self) -> str:
        """How it is mended."""
        return "dump" if self.moment.why_the_end else self.kind.strategy

    def schedule(self, step: int) -> str:
        """For TFT_INJECT."""
        names = dict(zip(("first", "second", "third"), (r for r in range(RANKS) if r != self.rank), strict=True))
        own = f"rank={self.rank},kind={self.kind.name},{self.moment.inject};"
        return (own + self.moment.others).format(step=step, **names)

    def target(self, step: int) -> int:
        """Step that all state has afterwards."""
        return step if self.moment.completed else step - 1

    def features(self) -> frozenset[str]:
        """What a sample must have at least once."""
        return frozenset({self.kind.name, self.moment.name, self.variant, f"{self.topology} rank {self.rank}"})


@dataclass(frozen=True)
class Packed:
    """A job with its cases and the step of each, in the order in which they happen.

    standby: the launcher keeps a process ready for the next lost rank.
    """

    cases: tuple[tuple[Case, int], ...]
    number: int
    standby: bool

    @property
    def job(self) -> tuple[str, str]:
        """What an unbroken run of it depends on."""
        return self.cases[0][0].job

    @property
    def name(self) -> str:
        """For test reports."""
        return f"{'-'.join(self.job)}-{self.number}"

    @property
    def schedule(self) -> str:
        """For TFT_INJECT."""
        return ";".join(case.schedule(step) for case, step in self.cases)

    @property
    def environ(self) -> dict[str, str]:
        """Variables of the job."""
        hangs = any(case.kind.hangs for case, _ in self.cases)
        return {"TFT_HANG_SECONDS": str(HANG_SECONDS)} if hangs else {}

    @property
    def ends(self) -> bool:
        """The job ends with its only case."""
        return self.cases[0][0].alone

    def lost(self, rank: int) -> int:
        """How often the process of a rank is replaced."""
        return sum(1 for case, _ in self.cases if case.rank == rank and case.strategy == "respawn")


def arguments(job: tuple[str, str], megatron: str) -> dict[str, Any]:
    """For tiny_gpt_args."""
    topology, variant = job
    # See support.matrix: after a restart core_v0.12 swaps which parameters of later pipeline stages decay.
    decay = ["--weight-decay", "0.0"] if (topology, megatron) == ("pp2dp2", "0.12") else []
    own = {**TOPOLOGIES[topology], **VARIANTS[variant]}
    return {
        **own,
        "train_iters": ITERATIONS,
        "eval_interval": EVALUATE_EVERY,
        "save_interval": SAVE_EVERY,
        "extra": [*own.get("extra", ()), *FLAGS, *decay],
    }


def _fits(topology: str, variant: str, rank: int, kind: Kind, moment: Moment) -> bool:
    if moment.name not in kind.moments:
        return False
    # Of the ranks of a tensor-parallel group the first one reads for all.
    if moment.name == "loader" and topology == "tp2dp2" and rank % 2:
        return False
    # Which updates are skipped depends on the numbers.
    return not (moment.updates and variant == "fp16")


def every_case(seed: int) -> list[Case]:
    """Every topology, rank, kind and moment that fit, in random order, each in a variant that the seed chooses."""
    chance = random.Random(seed)
    cases = []
    for topology in TOPOLOGIES:
        for rank in range(RANKS):
            for kind in KINDS.values():
                for moment in MOMENTS.values():
                    fitting = [one for one in VARIANTS if _fits(topology, one, rank, kind, moment)]
                    cases += [Case(topology, chance.choice(fitting), rank, kind, moment)] if fitting else []
    chance.shuffle(cases)
    return cases


class Packing:
    """Puts cases into jobs: those of one topology and variant together, as many as have room; each that ends its job
    by itself.
    """

    def __init__(self) -> None:
        self._boxes: dict[tuple[str, str], list[list[tuple[Case, int]]]] = {}

    def cost(self, case: Case) -> int:
        """Runs that one more case makes necessary: 0, 1, or 2 with an unbroken one."""
        if case.job not in self._boxes:
            return 2
        return int(self._room(case) is None)

    def add(self, case: Case) -> None:
        """Put a case where there is room, or into a new job."""
        room = self._room(case)
        if room is not None:
            box, step = room
            box.append((case, step))
            return
        boxes = self._boxes.setdefault(case.job, [])
        boxes.append([(case, case.moment.steps[len(boxes) % len(case.moment.steps)])])

    def _room(self, case: Case) -> tuple[list[tuple[Case, int]], int] | None:
        for box in [] if case.alone else self._boxes.get(case.job, []):
            if len(box) >= _MOST_IN_A_JOB or box[0][0].alone:
                continue
            free = [step for step in case.moment.steps if all(abs(step - taken) >= _APART for _, taken in box)]
            if free:
                return box, free[len(box) % len(free)]
        return None

    def jobs(self) -> list[Packed]:
        """The jobs, those with the same unbroken run next to each other."""
        packed: list[Packed] = []
        for job in sorted(self._boxes):
            for number, box in enumerate(self._boxes[job]):
                in_order = tuple(sorted(box, key=lambda one: one[1]))
                packed.append(Packed(in_order, number, standby=len(packed) % 2 == 0))
        return packed


def pack(cases: Iterable[Case]) -> list[Packed]:
    """Jobs for all of these cases."""
    packing = Packing()
    for case in cases:
        packing.add(case)
    return packing.jobs()


def sample(cases: Sequence[Case], size: int) -> list[Packed]:
    """Jobs with as many cases as asked for, few of the slow ones; chosen so that few features are missing, and among
    equals so that few runs are needed, with many pairs of kind and moment.
    """
    left, packing = list(cases), Packing()
    chosen: list[Case] = []
    seen: set[object] = set()

    jobs: Counter[tuple[str, str]] = Counter()

    def worth(case: Case) -> tuple[int, int, bool, int]:
        new = len(case.features() - seen)
        return new, -packing.cost(case), (case.kind, case.moment) not in seen, -jobs[case.job]

    while left and len(chosen) < size:
        best = max(left, key=worth)
        left.remove(best)
        if (best.kind.hangs and sum(one.kind.hangs for one in chosen) >= _MOST_HANGS) or (
            best.alone and sum(one.alone for one in chosen) >= _MOST_ALONE
        ):
            continue
        chosen.append(best)
        packing.add(best)
        jobs[best.job] += 1
        seen |= {*best.features(), (best.kind, best.moment)}
    return packing.jobs()


def seed_and_size(environ: Mapping[str, str]) -> tuple[int, int | None]:
    """TFT_MATRIX_SEED, and TFT_IN_PLACE_SIZE or None for everything (TFT_MATRIX=all)."""
    seed = int(environ.get("TFT_MATRIX_SEED") or DEFAULT_SEED)
    if environ.get("TFT_MATRIX") == "all":
        return seed, None
    return seed, int(environ.get("TFT_IN_PLACE_SIZE") or DEFAULT_SIZE)


def selected(environ: Mapping[str, str] = os.environ) -> list[Packed]:
    """The jobs of this run, those with the same unbroken run next to each other."""
    seed, size = seed_and_size(environ)
    cases = every_case(seed)
    return pack(cases) if size is None else sample(cases, size)
