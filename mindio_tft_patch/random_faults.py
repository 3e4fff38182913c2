"""A random schedule of faults that depends on its seed alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

from mindio_tft_patch.errors import ConfigError
from mindio_tft_patch.fault_injection import MOMENTS, PlannedFault, known_kinds

# Found without waiting for the hang limit, and no part of any training script's own doing.
PROMPT_KINDS = (
    "sigkill",
    "sigsegv",
    "exit",
    "exception",
    "memory_parameters",
    "memory_main_parameters",
    "memory_moments",
    "memory_gradients",
    "memory_activations",
    "broken_sockets",
)
# Moments that every step has.
EVERY_STEP = (
    "loader",
    "forward",
    "backward",
    "before_gate",
    "barrier",
    "after_gate",
    "in_update",
    "after_update",
    "gather",
    "between",
)


def random_schedule(
    seed: int,
    faults: int,
    ranks: int,
    steps: int,
    *,
    kinds: Sequence[str] = PROMPT_KINDS,
    moments: Sequence[str] = EVERY_STEP,
    spacing: int = 2,
) -> str:
    """A schedule in words, in the order of steps.

    Args:
        faults: how many. ranks: of the job.
        steps: of the job; the last one is left alone, because nothing follows it.
        spacing: least number of steps between two faults.

    Raises:
        ConfigError: unknown kinds or moments, or more faults than the steps hold.
    """
    for what, names, known in (("kind", kinds, known_kinds()), ("moment", moments, tuple(MOMENTS))):
        unknown = sorted(set(names) - set(known))
        if unknown or not names:
            raise ConfigError(
                f"{', '.join(unknown) or 'nothing'} is no {what} of fault.",
                change=f"--{what}s takes some of {', '.join(known)}.",
            )
    if min(faults, ranks, spacing) < 1:
        raise ConfigError(
            "A random schedule needs at least one fault, one rank and a spacing of one step.",
            change="Raise --random, --ranks or --spacing to 1 or more.",
        )
    free = steps - 1 - (faults - 1) * (spacing - 1)
    if free < faults:
        raise ConfigError(
            f"{faults} faults, {spacing} steps apart, do not fit into {steps} steps.",
            change="Give a smaller --random or --spacing, or more --steps (--train-iters of the command).",
        )
    chance = random.Random(seed)
    chosen = sorted(chance.sample(range(1, free + 1), faults))
    planned = [
        PlannedFault(
            rank=chance.randrange(ranks),
            step=step + number * (spacing - 1),
            moment=chance.choice(list(moments)),
            kind=chance.choice(list(kinds)),
        )
        for number, step in enumerate(chosen)
    ]
    return ";".join(fault.words() for fault in planned)
