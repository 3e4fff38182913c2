"""Digests of state: equal for equal bits, different for any other."""

from __future__ import annotations

import pytest
import torch

from mindio_tft_patch.adaptors.porting.digest import digest_of

SHAPES = [(0,), (1,), (3,), (7, 5), (1024,), (2**20 + 13,)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", SHAPES)
def test_equal_tensors_have_equal_digests(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    assert digest_of([("a", values)]) == digest_of([("a", values.clone())])


@pytest.mark.parametrize("place", [0, 1, 2**20 - 1, 2**20, 2**21 + 5])
def test_a_single_bit_makes_a_difference_wherever_it_is(place: int) -> None:
    values = torch.zeros(2**21 + 6, dtype=torch.float32)
    before = digest_of([("a", values)])
    values.view(torch.int32)[place] ^= 1
    assert digest_of([("a", values)]) != before


def test_two_values_that_change_places_make_a_difference() -> None:
    one, other = torch.tensor([1.0, 0.0, 0.0, 2.0]), torch.tensor([0.0, 1.0, 2.0, 0.0])
    assert digest_of([("a", one)]) != digest_of([("a", other)])


def test_not_a_number_is_compared_by_its_bits() -> None:
    assert digest_of([("a", torch.tensor([float("nan")]))]) == digest_of([("a", torch.tensor([float("nan")]))])


def test_names_types_and_shapes_count() -> None:
    values = torch.zeros(4)
    digests = {
        digest_of([("a", values)]),
        digest_of([("b", values)]),
        digest_of([("a", values.reshape(2, 2))]),
        digest_of([("a", values.to(torch.int32))]),
    }
    assert len(digests) == 4
