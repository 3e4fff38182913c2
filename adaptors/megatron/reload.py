"""Strategy reload, phase rollback: all ranks load the last checkpoint in place.

For jobs without a second copy of the optimizer state, and when no healthy copy is left. The processes, their groups and
their data sets stay; the steps since the checkpoint are computed again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mindio_tft_patch.adaptors.megatron import moe_statistics
from mindio_tft_patch.adaptors.megatron.checkpoint_files import read_tracker
from mindio_tft_patch.adaptors.megatron.data_source import DataSource
from mindio_tft_patch.adaptors.megatron.iteration_end import IterationEnd
from mindio_tft_patch.adaptors.megatron.log_state import LogState
from mindio_tft_patch.adaptors.megatron.rollback import Place, first_sample
from mindio_tft_patch.adaptors.megatron.train_state import TrainState, settle_rerun_machine
from mindio_tft_patch.adaptors.megatron.training_objects import Training
from mindio_tft_patch.errors import RecoveryError

log = logging.getLogger("mindio_tft_patch.rollback")


def load(training: Training, data: DataSource, log_state: LogState, ending: IterationEnd) -> Place:
    """Load the newest checkpoint of --save, or else of --load, on this rank together with all others.

    Raises:
        RecoveryError: there is none.
    """
    from megatron.training import checkpointing

    args = training.args
    folder = newest(args, "rollback")
    _forget_progress(args, training.scheduler)
    with _loading_from(args, folder):
        args.iteration, args.num_floating_point_operations_so_far = checkpointing.load_checkpoint(
            training.model,
            training.optimizer,
            training.scheduler,
            checkpointing_context=training.checkpointing_context or {},
        )
    step = int(args.iteration)
    training.state = TrainState(args, training.model, training.optimizer, training.scheduler, step)
    settle_rerun_machine(step)
    data.train_from(first_sample(args, step, args.consumed_train_samples), step)
    data.valid_from(args.consumed_valid_samples)
    log_state.resume(step, folder / f"iter_{step:07d}", args.log_interval)
    moe_statistics.put_back({})
    ending.forget()
    log.warning("all ranks are back at step %d, from the checkpoint in %s", step, folder)
    return Place(step, None)


def newest(args: Any, phase: str) -> Path:
    """The folder with the checkpoint to go back to.

    Raises:
        RecoveryError: there is none.
    """
    for folder in (args.save, args.load):
        if folder and read_tracker(Path(folder)) is not None:
            return Path(folder)
    raise RecoveryError(phase, f"there is no checkpoint in {args.save or args.load}, to which all could go back")


def _forget_progress(args: Any, scheduler: Any) -> None:
    """Megatron loads into a job that has done nothing yet, and insists on it."""
    args.consumed_train_samples = args.skipped_train_samples = args.consumed_valid_samples = 0
    args.iteration = 0
    scheduler.num_steps = 0


@contextmanager
def _loading_from(args: Any, folder: Path) -> Iterator[None]:
    """Everything is taken from the checkpoint, whatever the job left out when it started from another one."""
    wanted = {
        "load": str(folder),
        "finetune": False,
        "pretrained_checkpoint": None,
        "ckpt_step": None,
        "no_load_optim": False,
        "no_load_rng": False,
    }
    before = {name: getattr(args, name) for name in wanted if hasattr(args, name)}
    for name in before:
        setattr(args, name, wanted[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(args, name, value)
