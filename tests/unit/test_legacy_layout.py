"""The Megatron-LM of 2023: who is where, which piece is whose, and names of files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindio_tft_patch.adaptors.megatron_legacy.layout import (
    Piece,
    copy_groups,
    data_parallel_groups,
    optimizer_file,
    pieces,
    shards_in,
)
from mindio_tft_patch.adaptors.megatron_legacy.tree import is_tree


def test_data_parallel_groups_are_those_of_megatron() -> None:
    # The example in the documentation of its initialize_model_parallel: 16 ranks, TP 2, PP 4.
    assert data_parallel_groups(16, 2, 4) == [
        [0, 2],
        [1, 3],
        [4, 6],
        [5, 7],
        [8, 10],
        [9, 11],
        [12, 14],
        [13, 15],
    ]


def test_one_copy_is_on_all_model_parallel_positions() -> None:
    assert copy_groups(data_parallel_groups(8, 2, 1), 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert copy_groups(data_parallel_groups(8, 1, 2), 2) == [[0, 1, 4, 5], [2, 3, 6, 7]]


@given(numel=st.integers(1, 500), ranks=st.sampled_from([2, 4, 6, 8, 12]), copies=st.sampled_from([1, 2]))
def test_pieces_cover_the_parameters_once_and_end_where_the_buffer_is_cut(numel: int, ranks: int, copies: int) -> None:
    padded = -(-numel // ranks) * ranks  # as that Megatron pads: for all data-parallel ranks
    size = ranks // copies
    cut = pieces(numel, padded, size)
    assert [index for piece in cut for index in range(piece.start, piece.stop)] == list(range(numel))
    length = padded // size
    assert all(piece == Piece(min(number * length, numel), piece.stop) for number, piece in enumerate(cut))


def test_padding_for_more_ranks_moves_the_cut() -> None:
    # 6 ranks in two copies, 8 parameters: the buffer has 12 elements, and a third of it is 4, not ceil(8 / 3) = 3.
    assert pieces(8, 12, 3) == [Piece(0, 4), Piece(4, 8), Piece(8, 8)]


@pytest.mark.parametrize("position", ["mp_rank_00", "mp_rank_01_003"])
def test_optimizer_files_lie_beside_the_model_file(position: str, tmp_path: Path) -> None:
    model = tmp_path / "iter_0000005" / position / "model_rng.pt"
    for index in range(3):
        file = Path(optimizer_file(str(model), index))
        assert file == tmp_path / "iter_0000005" / f"{position}_{index:03d}" / "optim.pt"
        file.parent.mkdir(parents=True)
        file.touch()
    assert shards_in(str(model)) == 3


def test_shards_of_another_pipeline_stage_are_not_counted(tmp_path: Path) -> None:
    for folder in ("mp_rank_00_000_000", "mp_rank_00_000_001", "mp_rank_00_001_000"):
        (tmp_path / "iter_0000005" / folder).mkdir(parents=True)
        (tmp_path / "iter_0000005" / folder / "optim.pt").touch()
    assert shards_in(str(tmp_path / "iter_0000005" / "mp_rank_00_000" / "model_rng.pt")) == 2


def _tree(root: Path, *names: str) -> Path:
    for name in names:
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return root


def test_the_tree_of_2023_is_told_by_its_files(tmp_path: Path) -> None:
    assert is_tree(_tree(tmp_path / "old", "training.py", "core/parallel_state.py"))
    assert not is_tree(
        _tree(tmp_path / "new", "training/training.py", "core/parallel_state.py", "core/package_info.py")
    )
    assert not is_tree(_tree(tmp_path / "between", "training.py", "core/parallel_state.py", "core/package_info.py"))
