"""The fault matrix: which rank dies when, in which job, and what must be left. Pure; nothing runs here."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

RANKS = 4
ITERATIONS, EVALUATE_EVERY, SAVE_EVERY = 7, 3, 4
DEFAULT_SEED, DEFAULT_SIZE = 20241129, 24

TOPOLOGIES: dict[str, dict[str, Any]] = {
    "dp4": {},
    "tp2dp2": {"tp": 2},
    "pp2dp2": {"pp": 2},
    "ep2dp4": {"num_experts": 4, "ep": 2},
}

VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp16": {"dtype": "fp16"},
    "fp32": {"dtype": "fp32"},
    "overlap": {"overlap": True},
    "dropout": {"dropout": 0.1},
    "unsharded": {"distributed_optimizer": False},
    "torch": {"ckpt_format": "torch"},
    "torch_unsharded": {"ckpt_format": "torch", "distributed_optimizer": False},
    "virtual": {"vpp": 2},
    "virtual_overlap": {"vpp": 2, "overlap": True},
}
# Not every variant makes sense everywhere.
_ONLY: dict[str, tuple[str, ...]] = {"virtual": ("pp2dp2",), "virtual_overlap": ("pp2dp2",)}


def trains(topology: str, variant: str, megatron: str) -> bool:
    """Can this release of Megatron train such a job? core_v0.12 has no experts in fp16."""
    return (topology, variant, megatron) != ("ep2dp4", "fp16", "0.12")


@dataclass(frozen=True)
class Moment:
    """When a rank dies.

    inject: fault of the rank that dies; "{rank}" is replaced.
    step: step of the checkpoint that must be left; 0: none, because no step was completed.
    others: schedule for other ranks, with "{first}" and so on for the ranks that live.
    """

    name: str
    inject: str
    step: int
    others: str = ""

    def schedule(self, rank: int) -> str:
        """The schedule of the job in which `rank` dies."""
        living = [one for one in range(RANKS) if one != rank]
        names = dict(zip(("first", "second", "third"), living, strict=True))
        return f"rank={rank},kind=sigkill,{self.inject};{self.others.format(**names)}"


# Ahead of a kill behind the gate, so that the others have left the gate as well: only then is the outcome certain.
_LATE = "delay=0.5"
_RAISES = "moment=barrier,step=5,kind=collateral"

MOMENTS: tuple[Moment, ...] = (
    Moment("forward", "moment=forward,step=5", 4),
    Moment("backward", "moment=backward,step=5,count=2", 4),
    Moment("before_gate", "moment=before_gate,step=5", 4),
    Moment("after_gate", f"moment=after_gate,step=5,{_LATE}", 5),
    Moment("in_update", f"moment=in_update,step=5,{_LATE}", 5),
    # Others begin the evaluation that follows step 6.
    Moment("after_update", f"moment=after_update,step=6,{_LATE}", 6),
    Moment("gather", f"moment=gather,step=5,{_LATE}", 5),
    # The gate's barrier completes for some and raises for others.
    Moment(
        "gate_half",
        f"moment=after_gate,step=5,{_LATE}",
        5,
        others=f"rank={{first}},{_RAISES};rank={{third}},{_RAISES}",
    ),
    # Who passed the gate is the one who dies: nobody can know, so the step is lost for all alike.
    Moment(
        "gate_lost",
        f"moment=after_gate,step=5,{_LATE}",
        4,
        others=f"rank={{first}},{_RAISES};rank={{second}},{_RAISES};rank={{third}},{_RAISES}",
    ),
    Moment("between", "moment=between,step=5", 5),
    Moment("first_step", "moment=backward,step=1", 0),
    Moment("first_update", f"moment=in_update,step=1,{_LATE}", 1),
    Moment("second_step", "moment=forward,step=2,count=2", 1),
    Moment("evaluate", "moment=evaluate,step=3", 3),
    Moment("save_begin", "moment=save_begin,step=4", 4),
    Moment("save", "moment=save,step=4", 4),
    Moment("save_end", "moment=save_end,step=4", 4),
)


@dataclass(frozen=True)
class Case:
    """One combination."""

    topology: str
    variant: str
    rank: int
    moment: Moment = field(repr=False)

    @property
    def name(self) -> str:
        """For test reports."""
        return f"{self.topology}-{self.variant}-rank{self.rank}-{self.moment.name}"

    @property
    def job(self) -> tuple[str, str]:
        """What an unbroken run of it depends on."""
        return self.topology, self.variant

    def arguments(self, megatron: str) -> dict[str, Any]:
        """For tiny_gpt_args."""
        # core_v0.12 saves the parameter groups of rank 0 for all. On later pipeline stages they are in another order,
        # so that every ordinary restart swaps which parameters decay.
        decay = ["--weight-decay", "0.0"] if (self.topology, megatron) == ("pp2dp2", "0.12") else []
        return {
            "extra": decay,
            **TOPOLOGIES[self.topology],
            **VARIANTS[self.variant],
            "train_iters": ITERATIONS,
            "eval_interval": EVALUATE_EVERY,
            "save_interval": SAVE_EVERY,
        }

    def features(self) -> frozenset[str]:
        """What a sample must have at least once."""
        return frozenset({self.moment.name, f"{self.topology} rank {self.rank}", self.variant})


def every_case(seed: int) -> list[Case]:
    """Every topology, rank and moment, in random order, each in a variant that the seed chooses."""
    chance = random.Random(seed)
    cases = []
    for topology in TOPOLOGIES:
        variants = [name for name in VARIANTS if topology in _ONLY.get(name, (topology,))]
        for rank in range(RANKS):
            cases += [Case(topology, chance.choice(variants), rank, moment) for moment in MOMENTS]
    chance.shuffle(cases)
    return cases


def sample(cases: Sequence[Case], size: int) -> list[Case]:
    """As many cases as asked for, chosen so that few features are missing, and among equals so that few unbroken runs
    are needed to compare with.
    """
    left, chosen, seen, jobs = list(cases), [], set(), set()  # type: list[Case], list[Case], set[str], set[object]
    while left and len(chosen) < size:
        best = max(left, key=lambda case: (len(case.features() - seen), case.job in jobs))
        left.remove(best)
        chosen.append(best)
        seen |= best.features()
        jobs.add(best.job)
    return chosen


def seed_and_size(environ: Mapping[str, str]) -> tuple[int, int | None]:
    """TFT_MATRIX_SEED, and TFT_MATRIX_SIZE or None for everything (TFT_MATRIX=all)."""
    seed = int(environ.get("TFT_MATRIX_SEED") or DEFAULT_SEED)
    if environ.get("TFT_MATRIX") == "all":
        return seed, None
    return seed, int(environ.get("TFT_MATRIX_SIZE") or DEFAULT_SIZE)


def selected(environ: Mapping[str, str] = os.environ) -> list[Case]:
    """The cases of this run, those of one job next to each other."""
    seed, size = seed_and_size(environ)
    cases = every_case(seed)
    return sorted(cases if size is None else sample(cases, size), key=lambda case: case.job)
