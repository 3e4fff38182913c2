"""Checkpoints of the Megatron-LM of 2023 when the optimizer has copies: names, who writes, and refusals that are told.

The optimizer file of a rank is named by its shard within a copy, and the first copy writes it. So a checkpoint of d
data-parallel ranks in N copies is that of a stock job of d/N, and the same job finds its own files again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mindio_tft_patch.adaptors.megatron_legacy.layout import optimizer_file, shards_in
from mindio_tft_patch.adaptors.megatron_legacy.replica_groups import ReplicaGroups
from mindio_tft_patch.adaptors.porting import checkpoint_files as files
from mindio_tft_patch.errors import ConfigError

Groups = Callable[[], ReplicaGroups | None]


class LegacyCheckpoints:
    """Wrappers of functions in megatron.checkpointing.

    Args:
        groups: those of this rank; None where the optimizer has no copies.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def around_names(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wrapper of get_checkpoint_names, which returns the files of model and optimizer."""
        model, optimizer = wrapped(*args, **kwargs)
        groups = self._groups()
        if groups is None or optimizer == model:
            return model, optimizer
        return model, optimizer_file(model, groups.index)

    def around_save(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wrapper of save_checkpoint: the first copy writes the optimizer's files."""
        from megatron import get_args

        groups = self._groups()
        with _without_optimizer(get_args(), groups is not None and groups.number > 0):
            return wrapped(*args, **kwargs)

    def around_load(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wrapper of load_checkpoint, which ends the process with exit code 0 when a file cannot be read.

        Raises:
            ConfigError: the checkpoint is none of this job, or cannot be read.
        """
        from megatron import get_args

        megatron_args = get_args()
        folder = getattr(megatron_args, kwargs.get("load_arg", args[3] if len(args) > 3 else "load"))
        self._check_shards(megatron_args, folder)
        try:
            return wrapped(*args, **kwargs)
        except SystemExit as leaving:
            raise ConfigError(
                f"The checkpoint in {folder} could not be loaded; Megatron has printed why.",
                change="Change --load, or remove the incomplete checkpoint and its latest_checkpointed_iteration.txt.",
            ) from leaving

    def _check_shards(self, megatron_args: Any, folder: str | None) -> None:
        from megatron import checkpointing
        from megatron.core import mpu

        step = files.read_tracker(Path(folder)) if folder else None
        if step is None or not megatron_args.use_distributed_optimizer:
            return
        groups = self._groups()
        wanted = mpu.get_data_parallel_world_size() if groups is None else groups.size
        model, _ = checkpointing.get_checkpoint_names(folder, step, True)
        found = shards_in(model)
        if found and found != wanted:
            raise ConfigError(
                f"The checkpoint of step {step} in {folder} has {found} optimizer shards for each model-parallel "
                f"position, and this job has {wanted}: the optimizer state of this Megatron cannot be cut anew.",
                change="Change the number of ranks (or TFT_REPLICAS), or load only the model: convert the checkpoint "
                "to one without a distributed optimizer.",
            )


@contextmanager
def _without_optimizer(megatron_args: Any, on: bool) -> Iterator[None]:
    before = megatron_args.no_save_optim
    if on:
        megatron_args.no_save_optim = True
    try:
        yield
    finally:
        megatron_args.no_save_optim = before
