"""The training of the peers: a small model, with data that depend on step and rank alone.

Eight linear layers of 256 x 256 with ReLU between them, AdamW, 256 samples a rank and step.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch

from bench.peers.names import STEPS
from bench.step_writer import FOLDER

RANKS = 4
_SIZE, _LAYERS, _SAMPLES = 256, 8, 256


def steps_to_do() -> int:
    """Steps of the whole job."""
    return int(os.environ[STEPS])


def make_model() -> Any:
    """The same on every rank."""
    torch.manual_seed(1234)
    layers = [layer for _ in range(_LAYERS) for layer in (torch.nn.Linear(_SIZE, _SIZE), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers[:-1])


def make_optimizer(model: Any) -> Any:
    """AdamW, as in the examples of the peers."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_of(model: Any, step: int, rank: int) -> Any:
    """Forward pass on the data of this step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(_SAMPLES, _SIZE, generator=generator)
    return (model(inputs) - inputs.roll(1, dims=1)).square().mean()


def average_gradients(model: Any, world: int) -> None:
    """One all-reduce for all of them.

    Not torch's DistributedDataParallel: after its first step it forms other buckets, and so adds in another order, also
    after every restart. A result that is not bit-equal for that reason would say nothing about who restarted.
    """
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    torch.distributed.all_reduce(flat)
    flat /= world
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def write_digest(rank: int, model: Any, optimizer: Any) -> None:
    """Digest of parameters and optimizer state, for a comparison bit by bit."""
    digest = hashlib.sha256()
    states = optimizer.state_dict()["state"]
    tensors = [*model.state_dict().values(), *(value for key in sorted(states) for value in states[key].values())]
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    unfinished = Path(os.environ[FOLDER]) / f"digest-{rank}.unfinished"
    unfinished.write_text(digest.hexdigest())
    unfinished.rename(unfinished.with_suffix(""))
