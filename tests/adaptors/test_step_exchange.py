"""The losses of a step, summed by us and handed on, are for Megatron's own reduction what the original ones were."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from mindio_tft_patch.adaptors.device import cpu
from mindio_tft_patch.adaptors.megatron.moe_statistics import Statistic
from mindio_tft_patch.adaptors.megatron.step_exchange import (
    StepFacts,
    capacity_bytes,
    losses_of,
    micro_batches_of,
)


@pytest.fixture(autouse=True)
def _on_cpu() -> Any:
    cpu.install_cpu_stand_in()
    yield
    cpu.uninstall_cpu_stand_in()


def newer(micro_batches: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """What Megatron's train_step makes of losses from 0.17 on, before the reduction over ranks."""
    found = {}
    for name in micro_batches[0]:
        values = [one[name].view(-1) for one in micro_batches]
        found[name] = torch.vstack(values).sum(dim=0) if values[0].numel() == 2 else torch.cat(values).mean()
    return found


def older(micro_batches: list[dict[str, Any]]) -> dict[str, Any]:
    """The same of core_v0.12."""
    found = {}
    for name in micro_batches[0]:
        top: Any = 0
        bottom: Any = 0
        for one in micro_batches:
            value = one[name]
            top, bottom = (top + value[0], bottom + value[1]) if isinstance(value, tuple) else (top + value, bottom + 1)
        found[name] = top / bottom
    return found


def once_more(micro_batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Over the wire and back."""
    packed = msgspec.msgpack.encode(StepFacts(losses=losses_of(micro_batches)))
    return micro_batches_of(msgspec.msgpack.decode(packed, type=StepFacts).losses)


@pytest.mark.parametrize("number", [1, 2, 7])
@pytest.mark.parametrize("size", [1, 2])
def test_newer_releases_get_the_same_bits(number: int, size: int) -> None:
    torch.manual_seed(number)
    batches = [{"lm loss": torch.rand(size) * 1000, "mtp loss": torch.rand(size)} for _ in range(number)]
    expected, actual = newer(batches), newer(once_more(batches))
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


@pytest.mark.parametrize("number", [1, 2, 7])
def test_core_v0_12_gets_the_same_bits(number: int) -> None:
    torch.manual_seed(number)
    batches = [{"lm loss": (torch.rand(()) * 1000, torch.tensor(64.0))} for _ in range(number)]
    assert torch.equal(older(batches)["lm loss"], older(once_more(batches))["lm loss"])


def test_a_stage_without_losses_has_none() -> None:
    assert losses_of([]) is None and losses_of(None) is None
    assert micro_batches_of(None) == []


def test_there_is_room_for_every_layer() -> None:
    statistics = {
        name: Statistic([1.2345678901234567] * 96, "a-rather-long-name-of-a-group", "another-one")
        for name in ("load_balancing_loss", "z_loss", "seq_load_balancing_loss")
    }
    facts = StepFacts({"lm loss": ("sum", [1e9, 1e9])}, statistics, {"dense": "0" * 16, "expert": "0" * 16})
    assert len(msgspec.msgpack.encode(facts)) < capacity_bytes(96, experts=True)
