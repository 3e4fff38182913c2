"""Who dies when, and which faults are injected: the same for all who are compared. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass

MEMORY, NETWORK = "memory_parameters", "broken_sockets"
# Three faults of each kind in a job, with steps between them for a median.
_FAULT_STEPS = (4, 6, 9, 12, 15, 18)


@dataclass(frozen=True)
class Kill:
    """Who dies when. step: the last one that the rank completes. fraction: of a median step, after its end."""

    rank: int
    step: int
    fraction: float


def kills(rounds: int, first: int, last: int, ranks: int, seed: int = 20241129) -> list[Kill]:
    """One kill for each round: the steps first..last are cut into as many parts as there are rounds, one of each part.

    Rank 0 is spared: with it NVRx loses the store of its job.
    """
    chance = random.Random(seed)
    steps = [first + int((last + 1 - first) * (number + chance.random()) / rounds) for number in range(rounds)]
    chance.shuffle(steps)
    offset = chance.randrange(ranks - 1)
    return [
        Kill(1 + (number + offset) % (ranks - 1), step, round(chance.random(), 3)) for number, step in enumerate(steps)
    ]


def rotated(number: int, names: list[str]) -> list[str]:
    """The order of a round: everybody is first in turn."""
    start = number % len(names)
    return [*names[start:], *names[:start]]


def faults(job: int, ranks: int, seed: int = 20241129) -> tuple[str, list[str]]:
    """Schedule of TFT_INJECT with three faults of each kind, and the kind of each."""
    chance = random.Random(seed + job)
    offset = chance.randrange(ranks)
    kinds = [MEMORY if (place + job) % 2 == 0 else NETWORK for place in range(len(_FAULT_STEPS))]
    entries = []
    for place, (step, kind) in enumerate(zip(_FAULT_STEPS, kinds, strict=True)):
        moment = chance.choice(("forward", "backward"))
        entries.append(f"rank={(offset + place) % ranks},step={step},moment={moment},kind={kind}")
    return "; ".join(entries), kinds
