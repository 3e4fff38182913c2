"""The three faults of the demonstration's second act: which rank, when, and how they are called. Pure."""

from __future__ import annotations

import random

from mindio_tft_patch.fault_injection import PlannedFault
from mindio_tft_patch.launch.demo_job import RANKS

# Moment -> words. Those of a step that is under way, and those after its update.
_MOMENTS = {
    "forward": "in the forward pass of step {step}",
    "backward": "in the backward pass of step {step}",
    "before_gate": "before the update of step {step}",
    "after_gate": "at the update of step {step}",
    "in_update": "in the middle of the update of step {step}",
    "gather": "right after the update of step {step}",
    "between": "behind step {step}",
}
_KINDS = {
    "sigkill": "loses its process (SIGKILL)",
    "memory_moments": "has a memory error in its optimizer",
    "broken_sockets": "loses all its connections",
}
_PLACES = (0.3, 0.55, 0.8)  # of the training
_STRATEGIES = {
    "respawn": "a new process in its place",
    "retry": "all processes stayed",
    "reload": "all went back to the last checkpoint",
    "dump": "the job saved and ended",
    "exit": "the job ended",
}


def choose(steps: int, rank: int, chance: random.Random) -> tuple[PlannedFault, ...]:
    """One fault of each kind, on different ranks, at moments by chance.

    Args:
        steps: of the job. rank: the one that loses its process.
    """
    others = [one for one in range(RANKS) if one != rank]
    ranks = (rank, *chance.sample(others, len(_KINDS) - 1))
    return tuple(
        PlannedFault(where, round(steps * place), chance.choice(tuple(_MOMENTS)), kind)
        for kind, where, place in zip(_KINDS, ranks, _PLACES, strict=True)
    )


def what(fault: PlannedFault) -> str:
    """A fault in plain words, without its moment."""
    return f"rank {fault.rank} {_KINDS[fault.kind]}"


def when(fault: PlannedFault) -> str:
    """The moment of a fault in plain words."""
    return _MOMENTS[fault.moment].format(step=fault.step)


def how(strategy: str) -> str:
    """A strategy in plain words."""
    return f"{strategy}: {_STRATEGIES[strategy]}"
