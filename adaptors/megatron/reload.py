"""Strategy reload, phase rollback: all ranks load the last checkpoint in place.

For jobs without a second copy of the optimizer state, and when no healthy copy is left. The processes, their groups and
their data sets stay; the steps since the checkpoint are computed again.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mindio_tft_patch.adaptors.megatron import moe_statistics
from mindio_tft_patch.adaptors.megatron.data_source import DataSource
from mindio_tft_patch.adaptors.megatron.iteration_end import IterationEnd
from mindio_tft_patch.adaptors.megatron.log_state import LogState
from mindio_tft_patch.adaptors.megatron.past import Checkpoint
from mindio_tft_patch.adaptors.megatron.rollback import NOT_PLACEABLE, Place, first_sample
from mindio_tft_patch.adaptors.megatron.train_state import TrainState, settle_rerun_machine
from mindio_tft_patch.adaptors.megatron.training_objects import Training
from mindio_tft_patch.adaptors.porting.checkpoint_files import folder_name
from mindio_tft_patch.errors import RecoveryError

log = logging.getLogger("mindio_tft_patch.rollback")


_POLL_SECONDS = 0.05


def agree(training: Training, store: Any, *, leads: bool, attempt: int, check: Callable[[], None]) -> Checkpoint:
    """The checkpoint that all ranks go back to: rank 0 decides, and the others learn it from the job's store.

    Args:
        leads: this is rank 0.
        attempt: number of the recovery.
        check: called while waiting for rank 0; raises to give up.

    Raises:
        RecoveryError: there is none.
    """
    key = f"reload/{attempt}"
    if leads:
        try:
            answer = asdict(training.past.newest(training.args))
        except RecoveryError as refusal:
            store.set(key, json.dumps({"refused": str(refusal)}))
            raise
        store.set(key, json.dumps(answer))
    while not store.check([key]):
        check()
        time.sleep(_POLL_SECONDS)
    answer = json.loads(store.get(key))
    if "refused" in answer:
        raise RecoveryError("reload", answer["refused"].removeprefix("reload: "))
    return Checkpoint(**answer)


def load(
    checkpoint: Checkpoint, training: Training, data: DataSource, log_state: LogState, ending: IterationEnd
) -> Place:
    """Load a checkpoint on this rank together with all others.

    Raises:
        RecoveryError: the data cannot be brought there, or another checkpoint was loaded.
    """
    from megatron.training import checkpointing

    if not data.can_place_training:
        raise RecoveryError("rollback", NOT_PLACEABLE)
    args, folder = training.args, Path(checkpoint.folder)
    _forget_progress(args, training.scheduler)
    with _loading_from(args, checkpoint):
        args.iteration, args.num_floating_point_operations_so_far = checkpointing.load_checkpoint(
            training.model,
            training.optimizer,
            training.scheduler,
            checkpointing_context=training.checkpointing_context or {},
        )
    step = int(args.iteration)
    if step != checkpoint.step:
        raise RecoveryError("rollback", f"step {step} was loaded from {folder}, not step {checkpoint.step}")
    training.past.went_back()
    training.state = TrainState(args, training.model, training.optimizer, training.scheduler, step)
    settle_rerun_machine(step)
    data.train_from(first_sample(args, step, args.consumed_train_samples), step)
    if not data.valid_from(args.consumed_valid_samples):
        log.warning("the validation data cannot be read again from a given sample on; evaluations will differ")
    # A loader draws from torch's generator when it begins to be read; the record has the states as they were loaded.
    training.state.restore_generators()
    log_state.resume(step, folder / folder_name(step), args.log_interval)
    moe_statistics.put_back({})
    ending.forget()
    log.warning("all ranks are back at step %d, from the checkpoint in %s", step, folder)
    return Place(step, None)


def _forget_progress(args: Any, scheduler: Any) -> None:
    """Megatron loads into a job that has done nothing yet, and insists on it."""
    args.consumed_train_samples = args.skipped_train_samples = args.consumed_valid_samples = 0
    args.iteration = 0
    scheduler.num_steps = 0


@contextmanager
def _loading_from(args: Any, checkpoint: Checkpoint) -> Iterator[None]:
    """Everything is taken from the checkpoint, whatever the job left out when it started from another one."""
    wanted = {
        "load": checkpoint.folder,
        "finetune": False,
        "pretrained_checkpoint": None,
        "ckpt_step": checkpoint.step,
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
