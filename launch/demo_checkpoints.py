"""Two final checkpoints of the demonstration, compared bit by bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What must be equal, and how its entries in a `torch_dist` checkpoint are recognised (first match wins).
_PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("optimizer: main parameters", (".param",)),
    ("optimizer: exp_avg", (".exp_avg",)),
    ("optimizer: exp_avg_sq", (".exp_avg_sq",)),
    ("optimizer: step, learning rate, groups", ("optimizer.", "optimizer/")),
    ("random generator states", ("rng_state",)),
    ("scheduler, samples, iteration", ("common_state", "common.pt")),
    ("state of the rerun machine", ("rerun_state",)),
    ("weights", ("",)),
)
# Arguments in which Megatron notes what it loaded at the start, and where from (the totals at the end are elsewhere),
# and the flags in which the jobs differ.
_MAY_DIFFER = (
    "load",
    "iteration",
    "num_floating_point_operations_so_far",
    "enable_hbmfault_repair",
    "enable_worker_reboot",
)


@dataclass(frozen=True)
class Part:
    """One group of a checkpoint's entries. numbers: how many were compared. different: where they differ."""

    name: str
    numbers: int
    different: tuple[str, ...]


def compare(unbroken: Path, broken: Path) -> list[Part]:
    """Compare two checkpoint folders, part by part."""
    # Here, because it imports torch: a mistake on the command line should not take seconds to be told.
    from mindio_tft_patch.adaptors.megatron.checkpoint_compare import PERSONAL_ARGUMENTS, differences, read

    states = [read(folder) for folder in (unbroken, broken)]
    names: dict[str, list[str]] = {name: [] for name, _ in _PARTS}
    for key in {**states[0], **states[1]}:
        names[_part_of(key)].append(key)
    parts = []
    for name, keys in names.items():
        one, other = ({key: state[key] for key in keys if key in state} for state in states)
        found = tuple(differences(one, other, ignore=(*PERSONAL_ARGUMENTS, *_MAY_DIFFER)))
        parts.append(Part(name, sum(_numbers(value) for value in one.values()), found))
    return [*(part for part in parts if part.name == "weights"), *(part for part in parts if part.name != "weights")]


def _part_of(key: str) -> str:
    for name, marks in _PARTS:
        if any(key.endswith(mark) if mark.startswith(".") else key.startswith(mark) for mark in marks):
            return name
    raise AssertionError("the last part takes everything")


def _numbers(value: Any) -> int:
    """Numbers and other single values in a state."""
    if isinstance(value, dict):
        return sum(map(_numbers, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_numbers, value))
    size = getattr(value, "numel", None) or getattr(value, "__len__", None)
    if size is None or isinstance(value, (str, bytes)):
        return 0 if value is None else 1
    return int(size())
