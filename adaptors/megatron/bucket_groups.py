"""Megatron's groups of parameter buckets: what is under way in them, and how to forget it after a fault."""

from __future__ import annotations

from typing import Any


def bucket_groups(chunk: Any) -> list[Any]:
    """Of a DDP-wrapped model chunk, those of experts included."""
    return [*getattr(chunk, "bucket_groups", ()), *getattr(chunk, "expert_parallel_bucket_groups", ())]


def drop_handles(chunk: Any) -> None:
    """Forget collectives that were under way: some of their ranks are gone."""
    for group in bucket_groups(chunk):
        for name in ("param_gather_handle", "grad_reduce_handle"):
            if hasattr(group, name):
                setattr(group, name, None)


def count_anew(chunk: Any) -> None:
    """Let gradients be counted as in the first step.

    A process that has come back learns in its first step in which order gradients arrive, and until then reduces all of
    them at the end. The others must do the same, or the ranks' collectives would not match.
    """
    for group in bucket_groups(chunk):
        if hasattr(group, "is_first_batch"):
            group.is_first_batch = True
            group.golden_per_param_grad_ready_counts = {}
            group.per_param_grad_ready_counts = {}
        elif hasattr(group, "params_with_grad"):
            group.params_with_grad = set()
        for name, value in (("is_last_microbatch", True), ("grad_reduce_finished", False)):
            if hasattr(group, name):
                setattr(group, name, value)
