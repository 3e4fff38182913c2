"""What only one rank knows of a step, kept by its replica partners as well.

The losses that a rank has computed and the statistics of its mixture-of-experts layers are summed over the ranks only
*after* the update, to be logged. A rank that is lost between its update and the log would take them along, and the line
of a completed step could not be written. So, before the gate, each rank hands them to the holders of its own shard: a
few hundred bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from mindio_tft_patch.adaptors.megatron.moe_statistics import Statistic

log = logging.getLogger("mindio_tft_patch.gate")

_BASE_BYTES, _LAYER_BYTES = 2048, 128


class StepFacts(msgspec.Struct, frozen=True):
    """What one rank knows of one step.

    losses: by name, over the micro-batches of this rank: ("sum", [loss, tokens]), ("mean", [loss]) or ("pair",
        [numerator, denominator]), as Megatron's own reduction continues from there.
    statistics: of mixture-of-experts layers, by name.
    digests: of parameters and optimizer state at the step before, by replica set, where a scrub is due.
    """

    losses: dict[str, tuple[str, list[float]]] | None = None
    statistics: dict[str, Statistic] = {}
    digests: dict[str, str] = {}


def capacity_bytes(layers: int, experts: bool) -> int:
    """Room for the facts of one rank; the same on all ranks."""
    return _BASE_BYTES + (_LAYER_BYTES * layers if experts else 0)


def losses_of(micro_batches: Any) -> dict[str, tuple[str, list[float]]] | None:
    """Sum what forward_backward_func returned over the micro-batches, exactly as Megatron's train_step begins to.

    micro_batches: list of {name: [1] or [2] tensor, or (numerator, denominator)}; empty where there is no loss.
    """
    if not micro_batches:
        return None
    found = {}
    for name, first in micro_batches[0].items():
        values = [one[name] for one in micro_batches]
        if isinstance(first, (tuple, list)):
            found[name] = ("pair", [float(sum(value[place] for value in values)) for place in (0, 1)])
        elif first.numel() == 2:
            found[name] = ("sum", torch.vstack([value.view(-1) for value in values]).sum(dim=0).tolist())
        else:
            found[name] = ("mean", [torch.cat([value.view(-1) for value in values]).mean().item()])
    return found


def micro_batches_of(losses: Mapping[str, tuple[str, list[float]]] | None) -> list[dict[str, Any]]:
    """A single micro-batch with these losses: what train_step makes of it is what it made of the original ones."""
    if losses is None:
        return []
    revived: dict[str, Any] = {}
    for name, (kind, values) in losses.items():
        tensors = torch.tensor(values, dtype=torch.float32, device="cuda")
        revived[name] = (tensors[0], tensors[1]) if kind == "pair" else tensors
    return [revived]


class StepExchange:
    """Hands the facts of a step to the partners.

    Args:
        group: process group of the holders of this rank's shard, with collectives that wait on the host.
        ranks: its members.
        room: bytes for the facts of one rank.
    """

    def __init__(self, group: Any, ranks: tuple[int, ...], room: int) -> None:
        self._group = group
        self._ranks = ranks
        self._room = room

    def begin(self, facts: StepFacts) -> Callable[[], dict[int, StepFacts]]:
        """Begin to give own facts and to take those of the partners.

        Returns:
            To be called once: waits, and returns the facts of all members, by rank.
        """
        content = msgspec.msgpack.encode(facts)
        if len(content) > self._room - 4:
            log.warning("the facts of a step need %d bytes, there is room for %d", len(content), self._room - 4)
            content = msgspec.msgpack.encode(StepFacts(losses=facts.losses, digests=facts.digests))
        framed = len(content).to_bytes(4, "little") + content
        own = torch.zeros(self._room, dtype=torch.uint8)
        own[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        everyone = [torch.empty_like(own) for _ in self._ranks]
        work = dist.all_gather(everyone, own, group=self._group, async_op=True)

        def end() -> dict[int, StepFacts]:
            work.wait()
            return {rank: _decoded(packed) for rank, packed in zip(self._ranks, everyone, strict=True)}

        return end


def _decoded(packed: torch.Tensor) -> StepFacts:
    content = packed.numpy().tobytes()
    length = int.from_bytes(content[:4], "little")
    return msgspec.msgpack.decode(content[4 : 4 + length], type=StepFacts)
