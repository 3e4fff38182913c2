"""Targets of the issues, and whether a measurement meets them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.summary import Summary


@dataclass(frozen=True)
class Target:
    """A bound. least: the value must be above it; else below."""

    bound: float
    least: bool = False


# In the issues' words: "under 1 %", "within 1.3 x"; "with stand-by at least 8 x faster than torchrun's restart and
# under 3 s", "memory and network recovery under one second plus the recomputed step", "rebuild of all groups under
# 0.5 s".
TARGETS = {
    "overhead_vs_same_layout": Target(0.01),
    "dump_vs_torch_save": Target(1.3),
    "torchrun_vs.ours_standby": Target(8.0, least=True),
    "mttr_seconds.ours_standby": Target(3.0),
    "memory_fault_seconds": Target(1.0),
    "network_fault_seconds": Target(1.0),
    "rebuild_groups_seconds": Target(0.5),
}


def verdict(name: str, summary: Summary) -> str:
    """Whether the target is met; a median on the right side of it proves nothing while its interval holds both."""
    target = TARGETS.get(name)
    if target is None:
        return ""
    shown = ("> " if target.least else "< ") + replace(summary, median=target.bound).shown()[0]
    low, high = summary.low - target.bound, summary.high - target.bound
    if target.least:
        low, high = -high, -low
    if high < 0:
        return f"[green]met: {shown}[/]"
    if low > 0:
        return f"[red]missed: {shown}[/]"
    return f"[yellow]open: {shown}[/]"
