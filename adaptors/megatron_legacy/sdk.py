"""What `mindio_ttp.megatron_ttp` held for the Megatron-LM of 2023: for trees that were edited by hand (docs/sdk.md).

    load_checkpoint       in setup_model_and_optimizer, in place of Megatron's
    ReplicatedOptimizer   in place of DistributedOptimizer
    ttp_save_checkpoint   for ttp_register_save_ckpt_handler
    rename_save_result    for ttp_register_rename_handler

The checkpoint that the two callbacks write is the one that the adaptor writes by itself (dump.py), so the same job
loads it, edited by hand or not. Megatron's saves and loads are patched as there, when the first optimizer is built.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindio_tft_patch.adaptors.megatron.train_state import TrainState
from mindio_tft_patch.adaptors.megatron_legacy import content, newer_names
from mindio_tft_patch.adaptors.megatron_legacy.checkpoints import LegacyCheckpoints
from mindio_tft_patch.adaptors.megatron_legacy.dump import Speakers, refresh_parameters
from mindio_tft_patch.adaptors.megatron_legacy.layout import shards_in
from mindio_tft_patch.adaptors.megatron_legacy.patches import checkpoint_patches
from mindio_tft_patch.adaptors.megatron_legacy.replica_optimizer import ReplicatedOptimizer as _ReplicatedOptimizer
from mindio_tft_patch.adaptors.megatron_legacy.tree import VERSION
from mindio_tft_patch.adaptors.megatron_legacy.update import replica_groups
from mindio_tft_patch.adaptors.porting import checkpoint_files as files
from mindio_tft_patch.adaptors.porting.survivors import SurvivorsWorld
from mindio_tft_patch.adaptors.sdk import current
from mindio_tft_patch.errors import DumpError
from mindio_tft_patch.patching import Patch, PatchManager

log = logging.getLogger("mindio_tft_patch.sdk")

# What train() passes to ttp_set_ckpt_args: iteration, model, optimizer, scheduler.
StepArgs = tuple[int, list[Any], "ReplicatedOptimizer", Any]


class ReplicatedOptimizer(_ReplicatedOptimizer):
    """The optimizer with two copies, for a training loop that tells the SDK itself how far it is.

    Attributes:
        current_step: completed iterations; what the loop passes to ttp_end_updating_os.
        record_of: keeps the record of the last completed iteration; None before the scheduler is made.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _Patches.apply_once()
        super().__init__(*args, **kwargs)
        self.current_step = 0
        self.record_of: TrainState | None = None
        self._scheduler: Any = None
        self._skipped = False

    def attach(self, scheduler: Any) -> None:
        """The scheduler was made: from now on every iteration is recorded."""
        from megatron import get_args

        args = get_args()
        newer_names.complete_arguments(args)
        self._scheduler = scheduler
        self.record_of = TrainState(args, self.models, self, scheduler, self.current_step)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """An iteration begins."""
        if self.record_of is not None:
            self.record_of.before_step()
        super().zero_grad(set_to_none)

    def step(self, args: Any, timers: Any) -> Any:
        """Update; remembers whether the update was skipped."""
        result = super().step(args, timers)
        self._skipped = not result[0]
        return result

    def increase_step(self) -> None:
        """The update is complete, or was skipped: called by the training loop right after step()."""
        self.current_step += 1
        if self.record_of is not None:
            self.record_of.commit(self.current_step, self._skipped)

    def resumed_at(self, step: int) -> None:
        """A checkpoint was loaded."""
        self.current_step = step
        if self._scheduler is not None:
            self.attach(self._scheduler)


def load_checkpoint(model: Any, optimizer: Any, opt_param_scheduler: Any, **kwargs: Any) -> int:
    """Megatron's load_checkpoint. Returns the iteration."""
    from megatron import checkpointing

    iteration = int(checkpointing.load_checkpoint(model, optimizer, opt_param_scheduler, **kwargs))
    if isinstance(optimizer, ReplicatedOptimizer):
        optimizer.resumed_at(iteration)
    return iteration


def ttp_save_checkpoint(step: int, save_info: Sequence[dict[str, Any]], args: StepArgs, ctx: Any = None) -> None:
    """Write this rank's part of the checkpoint of `step` into a temporary folder; called on a thread of its own.

    Args:
        save_info: one entry for each optimizer; `ranks`: who speaks for each shard, in shard order.
        args: what was passed to ttp_set_ckpt_args.

    Raises:
        DumpError: it cannot be written.
    """
    from megatron import get_args

    _, model, optimizer, scheduler = args
    if optimizer.record_of is None:
        raise DumpError("training has not begun on this rank")
    if optimizer.record_of.record.step != step:
        raise DumpError(f"this rank is at step {optimizer.record_of.record.step}, not at {step}")
    optimizer.record_of.restore()
    processor = current.processor()
    ranks = tuple(save_info[0]["ranks"])
    world = SurvivorsWorld(
        sorted(ranks),
        attempt=processor.handlers.attempt(),
        deadline=time.monotonic() + processor.config.dump_timeout_seconds,
    )
    folder = _temporary(Path(get_args().save), step, processor.handlers.attempt())
    with world:
        speakers = Speakers(ranks, world.ranks, world.group("alive", world.ranks))
        refresh_parameters(model, optimizer, speakers, apart=True)
        for path, state in content.files(
            folder,
            get_args(),
            step,
            model=model if world.leads else [],
            optimizer=optimizer,
            scheduler=scheduler,
            index=ranks.index(world.rank),
        ):
            files.sync(content.write(path, state))


def rename_save_result(step: int, args: StepArgs) -> None:
    """Make what the ranks have written the checkpoint that a restart loads; called on one rank, after all saves.

    Raises:
        DumpError: a file is missing; older checkpoints and the tracker stay.
    """
    from megatron import get_args

    save = Path(get_args().save)
    folder = _temporary(save, step, current.processor().handlers.attempt())
    _check_complete(folder / files.folder_name(step), args[2].groups.size)
    path = files.publish(folder, save, step)
    files.discard(folder)
    log.info("dying-gasp checkpoint of step %d: %s", step, path)


def _temporary(save: Path, step: int, attempt: int) -> Path:
    """The same on all ranks, which do not talk to each other before they write."""
    return save / f"{files.TEMPORARY_PREFIX}{step}-{attempt}-ttp"


def _check_complete(folder: Path, shards: int) -> None:
    from megatron.core import mpu

    positions = mpu.get_tensor_model_parallel_world_size() * mpu.get_pipeline_model_parallel_world_size()
    models = sorted(folder.glob("*/model_rng.pt"))
    if len(models) != positions:
        raise DumpError(f"{folder} has the model files of {len(models)} model-parallel positions, not of {positions}")
    for model in models:
        found = shards_in(str(model))
        if found != shards:
            raise DumpError(f"{model.parent} has {found} optimizer shards, not {shards}")


class _Patches:
    """What a tree that was edited by hand still needs, put in place once in a process."""

    manager: PatchManager | None = None

    @classmethod
    def apply_once(cls) -> None:
        """Add the names that the adaptor's parts use; patch saving, loading and the making of the scheduler."""
        if cls.manager is not None:
            return
        newer_names.install()
        cls.manager = PatchManager()
        scheduler = Patch(
            11,
            "megatron.training:get_optimizer_param_scheduler",
            _attaching,
            "the record of every iteration",
            ("optimizer",),
        )
        cls.manager.apply([scheduler, *checkpoint_patches(LegacyCheckpoints(replica_groups))], VERSION)


def _attaching(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wrapper of get_optimizer_param_scheduler(optimizer)."""
    scheduler = wrapped(*args, **kwargs)
    optimizer = args[0] if args else kwargs["optimizer"]
    if isinstance(optimizer, ReplicatedOptimizer):
        optimizer.attach(scheduler)
    return scheduler
