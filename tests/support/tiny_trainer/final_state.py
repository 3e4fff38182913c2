"""For the tests: a digest of everything that training has changed on one rank, in a file below TFT_TEST_FOLDER."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def write_final_state(trainer: Any) -> None:
    """Write the digest of this rank; without the variable nothing."""
    if "TFT_TEST_FOLDER" in os.environ:
        folder = Path(os.environ["TFT_TEST_FOLDER"])
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f"state-{dist.get_rank()}.unfinished"
        unfinished.write_text(json.dumps(state_digests(trainer)))
        unfinished.rename(unfinished.with_suffix(".json"))


def state_digests(trainer: Any) -> dict[str, str]:
    """Name of each part of the state, and its digest."""
    return {name: hashlib.sha256(content).hexdigest()[:16] for name, content in _entries(trainer)}


def _entries(trainer: Any) -> Iterator[tuple[str, bytes]]:
    for name, parameter in trainer.model.named_parameters():
        yield f"model/{name}", _bytes(parameter)
    for name, value in trainer.optimizer.state().items():
        yield f"optimizer/{name}", _bytes(value)
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        for group in trainer.optimizer.optimizer.param_groups
    ]
    yield "optimizer/groups", repr(groups).encode()
    state = trainer.state()
    for name in ("step", "loss", "samples"):
        yield name, repr(state[name]).encode()
    yield "random/python", repr(state["random"]["python"]).encode()
    yield "random/numpy", state["random"]["numpy"][1].tobytes()
    yield "random/torch", _bytes(state["random"]["torch"])
    yield "random/device", _bytes(state["random"]["device"])
    for name, value in state["random"]["tracker"].items():
        yield f"random/tracker/{name}", _bytes(value)


def _bytes(tensor: torch.Tensor) -> bytes:
    # Of a copy: memory that numpy has seen cannot be given back any more.
    return bytes(tensor.detach().clone().reshape(-1).view(torch.uint8).numpy().tobytes())
