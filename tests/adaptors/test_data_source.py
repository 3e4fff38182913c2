"""Data iterators that go back to the last completed step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from mindio_tft_patch.adaptors.megatron.data_source import DataSource


class Sampler:
    """As Megatron's: begins behind `consumed_samples`."""

    def __init__(self, total: int, consumed_samples: int) -> None:
        self.total, self.consumed_samples = total, consumed_samples

    def __iter__(self) -> Any:
        yield from ([sample] for sample in range(self.consumed_samples, self.total))


def loader(total: int = 20, consumed: int = 0) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(torch.arange(total), batch_sampler=Sampler(total, consumed))  # type: ignore[arg-type]


def source_over(train: Any, valid: Any, step: int = 0) -> tuple[DataSource, Any, Any]:
    """A source as Megatron's set-up leaves it, with one training and one validation iterator."""
    source = DataSource()
    arguments = SimpleNamespace(dataloader_type="single", full_validation=False)
    with mock.patch.dict("sys.modules", {"megatron.training": SimpleNamespace(get_args=lambda: arguments)}):

        def build() -> None:
            for one in (train, valid, None):
                source.around_build_loader(lambda built=one: built, None, (), {})

        source.around_build_iterators(build, None, (), {})
    outer = [SimpleNamespace(iterable=iter(one)) for one in (train, valid)]
    source.attach(outer[0], outer[1], step)
    return source, outer[0], outer[1]


def test_a_rank_that_goes_back_one_step_reads_again_what_it_alone_had_used_up() -> None:
    source, train, _ = source_over(loader(), loader())
    assert int(next(train.iterable)) == 0
    source.advance(1)
    assert [int(next(train.iterable)) for _ in range(2)] == [1, 2]
    source.advance(2)  # a memory error follows, before any other rank has passed the gate
    source.rewind_to(1)
    assert [int(next(train.iterable)) for _ in range(3)] == [1, 2, 3]


def test_a_rank_that_has_left_out_an_iteration_goes_on_and_back() -> None:
    source, train, _ = source_over(loader(), loader())
    assert [int(next(train.iterable)) for _ in range(2)] == [0, 1]  # of iteration 1, which is left out, and of 2
    source.rewind_to(2)
    assert int(next(train.iterable)) == 2
    source.rewind_to(0)
    assert [int(next(train.iterable)) for _ in range(3)] == [0, 1, 2]


def test_a_rank_whose_own_update_failed_does_not_read_the_step_again() -> None:
    source, train, _ = source_over(loader(), loader())
    assert [int(next(train.iterable)) for _ in range(2)] == [0, 1]
    source.rewind_to(1)  # its state was taken over from a rank that has completed step 1
    assert int(next(train.iterable)) == 2
    source.rewind_to(1)
    assert int(next(train.iterable)) == 2


def test_a_process_that_has_come_back_reads_from_a_given_sample_on() -> None:
    source, train, valid = source_over(loader(), loader())
    assert source.train_from(7, 3) and source.valid_from(11)
    assert [int(next(train.iterable)) for _ in range(2)] == [7, 8]
    assert int(next(valid.iterable)) == 11
    source.advance(4)
    source.rewind_to(4)
    assert int(next(train.iterable)) == 9


def test_an_unknown_loader_cannot_be_placed() -> None:
    source, _, _ = source_over(loader(), loader())
    own = DataSource()
    own.attach(SimpleNamespace(iterable=iter([1, 2])), None, 0)
    assert not own.train_from(1, 1)
    assert source.can_place_validation


def test_a_rank_that_reads_no_data_has_nothing_to_place() -> None:
    source = DataSource()
    source.attach(None, None, 0)
    assert source.train_from(5, 1) and source.valid_from(5) and source.can_place_validation
