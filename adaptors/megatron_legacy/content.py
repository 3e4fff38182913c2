"""What the files of a checkpoint of the Megatron-LM of 2023 hold, and where they lie.

Written here and not by Megatron's save_checkpoint, because that one talks to all ranks of the job, of which some are
gone, and saves the arguments of the process as they are.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mindio_tft_patch.adaptors.megatron_legacy.layout import optimizer_file

_VERSION = 3.0


def model_content(args: Any, iteration: int, model: list[Any]) -> dict[str, Any]:
    """Arguments, model and random states; the latter are left out with --no-save-rng."""
    from megatron.core import mpu
    from megatron.utils import unwrap_model

    content: dict[str, Any] = {
        "args": argparse.Namespace(**vars(args)),
        "checkpoint_version": _VERSION,
        "iteration": iteration,
    }
    chunks = unwrap_model(model)
    for number, chunk in enumerate(chunks):
        if len(chunks) > 1:
            mpu.set_virtual_pipeline_model_parallel_rank(number)
        name = "model" if len(chunks) == 1 else f"model{number}"
        content[name] = chunk.state_dict_for_save_checkpoint()
    if not args.no_save_rng:
        content["rng_state"] = _random_states(args)
    return content


def optimizer_content(optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """State of this rank's shard, and of the learning-rate scheduler."""
    return {"optimizer": optimizer.state_dict(), "opt_param_scheduler": scheduler.state_dict()}


def files(
    folder: Path, args: Any, iteration: int, *, model: list[Any], optimizer: Any, scheduler: Any, index: int | None
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield path and content of what this rank writes.

    Args:
        folder: above `iter_<iteration>`.
        model: empty: another rank writes the model.
        index: of the optimizer shard that this rank writes; None: another rank does.
    """
    from megatron import checkpointing

    path, both = checkpointing.get_checkpoint_names(str(folder), iteration, args.use_distributed_optimizer)
    first = model_content(args, iteration, model) if model else {}
    second = optimizer_content(optimizer, scheduler) if index is not None and not args.no_save_optim else {}
    if both == path:  # without a distributed optimizer one file holds both
        if first:
            yield Path(path), {**first, **second}
        return
    if first:
        yield Path(path), first
    if second:
        assert index is not None
        yield Path(optimizer_file(path, index)), second


def write(path: Path, content: dict[str, Any]) -> Path:
    """Write one file; its folders are made if need be. Returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)
    return path


def _random_states(args: Any) -> list[dict[str, Any]]:
    """One for each data-parallel rank with --data-parallel-random-init; those that are gone take this rank's."""
    from megatron.core import mpu, tensor_parallel

    own = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    return [own] * (mpu.get_data_parallel_world_size() if args.data_parallel_random_init else 1)
