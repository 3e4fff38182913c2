"""Buffers come back as they were; large ones that no checkpoint holds are left alone."""

from __future__ import annotations

import torch

from mindio_tft_patch.adaptors.megatron.train_state import ModelBuffers


class Router(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("bias", torch.tensor([1.0, 2.0]))
        self.register_buffer("counts", torch.zeros(2), persistent=False)
        self.register_buffer("table", torch.zeros(10_000), persistent=False)
        self.register_buffer("later", None)


def test_buffers_are_put_back_also_those_set_after_the_start() -> None:
    model = [torch.nn.Sequential(torch.nn.Linear(2, 2), Router()), torch.nn.Linear(2, 2)]
    router = model[0][1]
    buffers = ModelBuffers(model)
    router.later = torch.tensor([7.0])
    copies = buffers.copies()
    assert [sorted(chunk) for chunk in copies] == [["1.bias", "1.counts", "1.later"], []]
    router.bias += 1
    router.later += 1
    router.counts += 5
    router.table += 1
    router.weight.data += 1
    buffers.restore(copies)
    assert router.bias.tolist() == [1.0, 2.0]
    assert router.later.tolist() == [7.0]
    assert router.counts.tolist() == [0.0, 0.0]
    assert router.table[0] == 1.0
    assert router.weight.tolist() == [2.0, 2.0]
