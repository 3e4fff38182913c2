"""Who is where in the Megatron-LM of 2023, and which piece of a buffer is whose: arithmetic without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mindio_tft_patch.adaptors.porting.replica_layout import parts


@dataclass(frozen=True)
class Piece:
    """Elements start..stop of a buffer that one rank updates; empty where only padding is left for it."""

    start: int
    stop: int


def data_parallel_groups(world: int, tensor: int, pipeline: int) -> list[list[int]]:
    """Ranks of every data-parallel group, in the order in which that Megatron creates them.

    Tensor-parallel ranks are neighbours, pipeline stages are `world / pipeline` apart.
    """
    stage = world // pipeline
    return [
        list(range(first * stage + offset, (first + 1) * stage, tensor))
        for first in range(pipeline)
        for offset in range(tensor)
    ]


def copy_groups(groups: list[list[int]], copies: int) -> list[list[int]]:
    """All ranks that together hold one copy of everything, for each copy."""
    return [sorted(rank for ranks in groups for rank in parts(ranks, copies)[number]) for number in range(copies)]


def pieces(numel: int, numel_padded: int, size: int) -> list[Piece]:
    """Cut a buffer for `size` ranks.

    The length of a piece comes from the padded size, because that is what is reduced and gathered; cutting
    ceil(numel / size) elements gives other pieces as soon as the padding was made for more ranks than `size`.

    Args:
        numel: elements that belong to parameters.
        numel_padded: elements of the buffer; divisible by `size`.
    """
    length = numel_padded // size
    starts = range(0, length * size, length) if length else [0] * size
    return [Piece(min(start, numel), min(start + length, numel)) for start in starts]


def optimizer_file(model_file: str, index: int) -> str:
    """Path of the optimizer state of a shard, beside the model file of its model-parallel position.

    model_file: .../iter_0000005/mp_rank_00/model_rng.pt. index: of the shard, within one copy.
    """
    folder = Path(model_file).parent
    return str(folder.with_name(f"{folder.name}_{index:03d}") / "optim.pt")


def shards_in(model_file: str) -> int:
    """How many optimizer shards a checkpoint holds for the position of a model file."""
    folder = Path(model_file).parent
    return len(list(folder.parent.glob(f"{folder.name}_[0-9][0-9][0-9]/optim.pt")))
