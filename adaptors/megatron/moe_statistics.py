"""Megatron's sums of mixture-of-experts statistics, which a step collects and its log line reduces and clears.

Newer releases keep them in a MoEMetricsTracker, core_v0.12 in a dictionary of parallel_state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
import torch.distributed.distributed_c10d as c10d


class Statistic(msgspec.Struct, frozen=True):
    """One statistic of one rank.

    values: a sum for each layer.
    reduce, average: names of the groups over which it will be reduced; empty: none.
    over_data_parallel: it is also averaged over the data-parallel group.
    """

    values: list[float]
    reduce: str = ""
    average: str = ""
    over_data_parallel: bool = True


def collected() -> dict[str, Statistic]:
    """What this rank has collected, by name."""
    return {
        name: Statistic(
            values=_field(entry, "values").detach().float().tolist(),
            reduce=_name(_field(entry, "reduce_group")),
            average=_name(_field(entry, "avg_group")),
            over_data_parallel=bool(getattr(entry, "needs_dp_avg", True)),
        )
        for name, entry in _entries().items()
    }


def put_back(statistics: Mapping[str, Statistic]) -> None:
    """Set what this rank has collected; statistics that are not given are zero."""
    for name, entry in _entries().items():
        if name not in statistics:
            _field(entry, "values").zero_()
    for name, one in statistics.items():
        values = torch.tensor(one.values, dtype=torch.float32, device="cuda")
        entry = _entries().get(name)
        if entry is None:
            _create(name, values, one)
        else:
            _field(entry, "values").copy_(values)


def _tracker() -> Any:
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:
        from megatron.core import parallel_state

        return parallel_state.get_moe_layer_wise_logging_tracker()
    return get_moe_metrics_tracker()


def _entries() -> dict[str, Any]:
    tracker = _tracker()
    entries: dict[str, Any] = tracker if isinstance(tracker, dict) else tracker.metrics
    return entries


def _field(entry: Any, name: str) -> Any:
    return entry.get(name) if isinstance(entry, dict) else getattr(entry, name)


def _create(name: str, values: torch.Tensor, one: Statistic) -> None:
    """A process that has come back has not collected anything yet."""
    reduce, average = _group(one.reduce), _group(one.average)
    tracker = _tracker()
    if isinstance(tracker, dict):
        tracker[name] = {"values": values, "reduce_group": reduce, "avg_group": average}
        return
    tracker.ensure_initialized(name, len(one.values), device=values.device)
    entry = tracker.metrics[name]
    entry.values.copy_(values)
    entry.reduce_group, entry.avg_group, entry.needs_dp_avg = reduce, average, one.over_data_parallel


def _name(group: Any) -> str:
    return "" if group is None else str(c10d._world.pg_names.get(group, ""))


def _group(name: str) -> Any:
    return next((group for group, known in c10d._world.pg_names.items() if name and known == name), None)
