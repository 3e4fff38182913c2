"""Tensorboard gets every point once."""

from __future__ import annotations

from typing import Any

from mindio_tft_patch.adaptors.megatron.points import write_points_once


class Writer:
    """Remembers what it is given."""

    def __init__(self) -> None:
        self.points: list[tuple[str, float, Any]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: Any = None) -> None:
        self.points.append((tag, scalar_value, global_step))


def test_a_step_that_is_logged_again_gives_no_second_point() -> None:
    writer = Writer()
    write_points_once(writer)
    write_points_once(writer)
    for step in (1, 2, 3, 2, 3, 4):
        writer.add_scalar("loss", 0.5, step)
        writer.add_scalar("loss vs samples", 0.5, global_step=16 * step)
    assert [step for tag, _, step in writer.points if tag == "loss"] == [1, 2, 3, 4]
    assert [step for tag, _, step in writer.points if tag != "loss"] == [16, 32, 48, 64]


def test_points_without_a_step_are_all_written() -> None:
    writer = Writer()
    write_points_once(writer)
    writer.add_scalar("note", 1.0)
    writer.add_scalar("note", 1.0)
    assert len(writer.points) == 2


def test_a_rank_without_a_writer_is_left_alone() -> None:
    write_points_once(None)
