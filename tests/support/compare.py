"""Whether a run that was broken and resumed is the same as one that was not."""

from __future__ import annotations

from collections.abc import Collection

from support.final_state import differences
from support.jobs import RANKS, Job

# Megatron saves one generator state for each model-parallel position, that of data-parallel rank 0, and so gives the
# other expert-parallel ranks a foreign one at every ordinary restart. After the set-up nothing draws from it but
# --moe-router-force-load-balancing.
_NOT_MEGATRONS_TO_KEEP = "rng/tracker/expert-parallel-rng"


def differences_of_runs(unbroken: Job, resumed: Job) -> list[str]:
    """What the final states of the ranks do not have in common, bit by bit."""
    one, other = unbroken.states(), resumed.states()
    if set(one) != set(range(RANKS)) or set(other) != set(range(RANKS)):
        return [f"ranks with a final state: {sorted(one)} and {sorted(other)}"]
    return [
        f"rank {rank}: {name}"
        for rank in one
        for name in differences(one[rank], other[rank])
        if name != _NOT_MEGATRONS_TO_KEEP
    ]


def differences_of_logs(unbroken: Job, broken: Job, resumed: Job, step: int, start: int = 0) -> list[str]:
    """Where the training log differs.

    A broken run may lack the line of its last step, which Megatron prints after the update. Every other line must be
    there, once, and be the one of the unbroken run. One exception: newer releases print the average of iterations 1
    and 2 as iteration 2, so that line differs when the fault came before the losses of iteration 1 were logged.

    step: where the broken run ended. start: where it began.
    """
    expected, before, after = unbroken.losses(), broken.losses(), resumed.losses()
    unlogged = step if step > start and step not in before else 0
    found = []
    for iteration, lines in expected.items():
        if iteration <= start or iteration == unlogged:
            continue
        actual = (before if iteration <= step else after).get(iteration, [])
        if iteration == 2 and unlogged == 1 and len(actual) == len(lines):
            continue
        if actual != lines:
            found.append(f"iteration {iteration}: {actual} instead of {lines}")
    return found + [f"iteration {one} is logged again" for one in sorted(after) if one <= step]


def differences_in_place(
    unbroken: Job, mended: Job, again: Collection[int] = (), *, lines_may_repeat: bool = False
) -> list[str]:
    """What a run that was mended while it stayed up does not have in common with one without a fault.

    Final states bit by bit; every log line and every line about an evaluation, once and with the same text.

    again: iterations whose log lines must be there twice, because a checkpoint was loaded.
    lines_may_repeat: the node of the rank that prints was lost, and with it the knowledge of what it had printed.
    """
    found = differences_of_runs(unbroken, mended)
    expected, actual = unbroken.losses(), mended.losses()
    for iteration in sorted({*expected, *actual}):
        lines = expected.get(iteration, []) * (2 if iteration in again else 1)
        found_lines = actual.get(iteration, [])
        if lines_may_repeat:
            found_lines = sorted(set(found_lines))
        if found_lines != lines:
            found.append(f"iteration {iteration}: {actual.get(iteration)} instead of {lines}")
    if not lines_may_repeat and mended.validations() != unbroken.validations():
        found.append(f"evaluations: {mended.validations()} instead of {unbroken.validations()}")
    return found
