"""Phase resume: make Megatron's training loop enterable again.

`train()` expects what a fresh set-up leaves behind. A fault leaves hooks, handles, timers and cached answers of the
iteration that it has cut off.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import logging
from collections.abc import Iterator
from typing import Any

from mindio_tft_patch.adaptors.megatron.bucket_groups import count_anew, drop_handles
from mindio_tft_patch.adaptors.megatron.rollback import Place
from mindio_tft_patch.adaptors.megatron.train_state import leaf_optimizers

log = logging.getLogger("mindio_tft_patch.resume")


# Kept by Megatron between saves, or from a load to the next save.
_PLANS = ("save_strategy", "load_strategy", "local_checkpoint_cache")


def resume(
    place: Place,
    *,
    args: Any,
    model: list[Any],
    optimizer: Any,
    rerun_mode: Any,
    checkpointing_context: dict[str, Any] | None = None,
) -> None:
    """Prepare this rank for train().

    Args:
        rerun_mode: mode of Megatron's rerun machine, which an evaluation switches off for its time.
        checkpointing_context: Megatron's, which it hands to every save.
    """
    args.iteration = place.step - (place.end is not None)
    args.curr_iteration = args.iteration
    _restore_micro_batches(args)
    _forget_sync_functions(model)
    _reset_timers()
    for chunk in model:
        drop_handles(chunk)
        count_anew(chunk)
        _enable_forward_hooks(chunk)
    _forget_cached_answers(optimizer)
    _abandon_asynchronous_saves()
    forget_plans(checkpointing_context)
    if rerun_mode is not None:
        from megatron.core.rerun_state_machine import get_rerun_state_machine

        get_rerun_state_machine().set_mode(rerun_mode)
    # The graph and the activations of the interrupted step hang in reference cycles. Quick, because freeze_setup() has
    # put everything older aside.
    gc.collect()


def freeze_setup(*, collect: bool) -> None:
    """Let later garbage collections leave out what the set-up has made: millions of objects that stay.

    Args:
        collect: first collect what the set-up has left behind.
    """
    if collect:
        gc.collect()
    gc.freeze()


def current_rerun_mode() -> Any:
    """Mode of Megatron's rerun machine."""
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    return get_rerun_state_machine().get_mode()


@contextlib.contextmanager
def rerun_mode_survives() -> Iterator[None]:
    """Put the mode of Megatron's rerun machine back when the work inside raises.

    An evaluation switches the machine off for its time. A rank that was interrupted in it would leave the machine's
    state out of a checkpoint to which ranks that had not begun theirs add it, and no complete checkpoint comes of that.
    """
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    mode = current_rerun_mode()
    try:
        yield
    except BaseException:
        get_rerun_state_machine().mode = mode  # not set_mode(), which writes a line on every rank
        raise


def _restore_micro_batches(args: Any) -> None:
    """Batch-size ramp-up: the calculator knows only the samples that it was told last."""
    from megatron.core.num_microbatches_calculator import update_num_microbatches

    update_num_microbatches(args.consumed_train_samples, consistency_check=False)


def _forget_sync_functions(model: list[Any]) -> None:
    """train() sets them, and insists that nobody has."""
    from megatron.core.utils import get_model_config

    for chunk in model:
        config = get_model_config(chunk)
        config.no_sync_func = config.grad_sync_func = config.param_sync_func = None


def _reset_timers() -> None:
    from megatron.training import get_timers

    for timer in get_timers()._timers.values():
        # reset() alone leaves a timer running, and starting it twice is an error.
        timer._started = False
        timer.reset()


def _enable_forward_hooks(chunk: Any) -> None:
    """--overlap-param-gather: train() switches them off for its first iteration, and they must be on for that."""
    handles = getattr(chunk, "remove_forward_pre_hook_handles", None)
    if handles is None or not getattr(chunk, "use_forward_hook", getattr(chunk, "overlap_param_gather", False)):
        return
    if len(handles) == sum(1 for _ in chunk.module.modules()):
        return
    for handle in handles.values():
        with contextlib.suppress(AttributeError):
            handle.remove()
    handles.clear()
    chunk.enable_forward_pre_hook()


def _forget_cached_answers(optimizer: Any) -> None:
    """Answers that were found by a collective on first use: a process that has come back would ask alone."""
    for one in (optimizer, *leaf_optimizers(optimizer)):
        if getattr(one, "_has_grad_norm_group_cache", None) is not None:
            one._has_grad_norm_group_cache = None


def forget_plans(checkpointing_context: dict[str, Any] | None) -> None:
    """--ckpt-assume-constant-structure: the next save is planned anew, on all ranks.

    Ranks that hold the plan of an earlier save leave out collectives that a process that has come back would wait in.
    """
    for name in _PLANS:
        (checkpointing_context or {}).pop(name, None)


def _abandon_asynchronous_saves() -> None:
    """--async-save: a checkpoint that was being written stays incomplete; the tracker does not name it.

    Every rank numbers its saves, and they compare the numbers: all must begin anew, as those do that have come back.
    """
    from megatron.training import async_utils

    _empty(getattr(async_utils, "_async_calls_queue", None))
    with contextlib.suppress(ImportError):
        from megatron.core.dist_checkpointing.strategies import base

        _empty(getattr(base, "async_calls", None))  # core_v0.12 saves through a queue in any case


def _empty(queue: Any) -> None:
    if queue is None:
        return
    calls = list(queue.async_calls)
    if calls:
        log.warning("%d asynchronous saves that were under way are given up; the next one is complete", len(calls))
    abort = {"abort": True} if "abort" in inspect.signature(queue.close).parameters else {}
    for one in (*(call.async_caller for call in calls), *([queue] if abort else [])):
        process = getattr(one, "process", None)
        with contextlib.suppress(Exception):
            if process is not None:
                process.kill()  # older releases only know how to wait for the writer
            one.close(**abort)
    queue.async_calls.clear()
    queue.call_idx = -1
