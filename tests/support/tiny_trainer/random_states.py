"""The random generators that training draws from."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel


def seed_everything(seed: int) -> None:
    """Begin: the same on all ranks, but for what tensor-parallel ranks must draw differently."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def random_states() -> dict[str, Any]:
    """States of all of them: copies, which later draws leave alone."""
    tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": {name: state.clone() for name, state in tracker.items()},
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Put them back."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    torch.cuda.set_rng_state(states["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states({name: one.clone() for name, one in states["tracker"].items()})
