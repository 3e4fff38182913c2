"""Whether a run that was broken and resumed is the same as one that was not."""

from __future__ import annotations

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
    there, once, and be the one of the unbroken run.

    step: where the broken run ended. start: where it began.
    """
    expected, before, after = unbroken.losses(), broken.losses(), resumed.losses()
    found = []
    for iteration, lines in expected.items():
        source = before if iteration <= step else after
        if iteration <= start or (iteration == step and iteration not in before):
            continue
        if source.get(iteration) != lines:
            found.append(f"iteration {iteration}: {source.get(iteration)} instead of {lines}")
    found += [f"iteration {one} is logged again" for one in sorted(after) if one <= step]
    return found
