"""A digest of everything that training has changed on one rank, and where two of them differ."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch


def write_state(path: Path, model: Any, optimizer: Any, scheduler: Any) -> None:
    """Write the digest of this rank."""
    from megatron.training.global_vars import get_args

    state = dict(_entries(get_args(), model, optimizer, scheduler))
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(state))
    unfinished.rename(path)


def differences(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """Names of what is not equal bit by bit."""
    return sorted(key for key in {**one, **other} if one.get(key) != other.get(key))


def _entries(args: Any, model: Any, optimizer: Any, scheduler: Any) -> Iterator[tuple[str, str]]:
    from megatron.core import tensor_parallel

    # core_v0.12 sets it in its first step; a job that has none left to do has stopped behind the last one.
    yield "curr_iteration", str(getattr(args, "curr_iteration", args.iteration - 1))
    for name in ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples"):
        yield name, str(getattr(args, name))
    yield "scheduler", str(sorted(scheduler.state_dict().items()))
    for number, chunk in enumerate(model):
        for name, value in (*chunk.named_parameters(), *chunk.named_buffers()):
            yield f"model/{number}/{name}", _digest(value)
    for number, leaf in enumerate(_leaves(optimizer)):
        yield from _optimizer_entries(f"optimizer/{number}", leaf)
    yield "rng/python", _digest_text(random.getstate())
    yield "rng/numpy", _digest_text(np.random.get_state()[1].tolist())
    yield "rng/torch", _digest(torch.get_rng_state())
    for name, value in tensor_parallel.get_cuda_rng_tracker().get_states().items():
        yield f"rng/tracker/{name}", _digest(value)


def _leaves(optimizer: Any) -> list[Any]:
    inner = getattr(optimizer, "chained_optimizers", None)
    return [optimizer] if inner is None else [leaf for one in inner for leaf in _leaves(one)]


def _optimizer_entries(where: str, leaf: Any) -> Iterator[tuple[str, str]]:
    scaler = getattr(leaf, "grad_scaler", None)
    yield f"{where}/scaler", str(None if scaler is None else _plain(scaler.state_dict()))
    if leaf.optimizer is None:  # this rank has no share of it
        return
    for group_number, group in enumerate(leaf.optimizer.param_groups):
        # "step" is what a checkpoint that was loaded had; torch's Adam counts for each parameter, below. "wd_mult" goes
        # into "weight_decay".
        scalars = {
            key: _plain(value) for key, value in sorted(group.items()) if key not in ("params", "step", "wd_mult")
        }
        yield f"{where}/group{group_number}", str(scalars)
        for number, parameter in enumerate(group["params"]):
            own = f"{where}/group{group_number}/{number}"
            yield f"{own}/main_param", _digest(parameter)
            for name, value in sorted(leaf.optimizer.state[parameter].items()):
                yield f"{own}/{name}", _digest(value) if isinstance(value, torch.Tensor) else str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return value


def _digest(value: torch.Tensor) -> str:
    content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{value.dtype}{list(value.shape)} {hashlib.sha256(content).hexdigest()[:16]}"


def _digest_text(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
