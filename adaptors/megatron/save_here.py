"""Megatron's own save_checkpoint, made to save into a temporary folder among survivors.

Everything that decides about content and format stays Megatron's. What is overridden while the block runs, and why:

| what                                   | why                                                                        |
|----------------------------------------|----------------------------------------------------------------------------|
| args.save                              | the temporary folder                                                       |
| args.async_save                        | the process is about to end                                                |
| args.ckpt_assume_constant_structure    | its caches describe the files of all ranks                                 |
| args.data_parallel_random_init         | its gather asks dead ranks; done among survivors instead                   |
| generate_state_dict                    | the checkpoint must hold the arguments of the job, not those above         |
| dist_checkpointing.save                | every shard needs a living writer (promote.py); validated there            |
| FullyParallelSaveStrategyWrapper       | its group has dead ranks; promote.py has balanced the writing already      |
| data-parallel ranks, in `torch` format | rank 0, which writes the file, may be dead                                 |
| the writers' result queue              | would start a manager process; all writing is done in this one             |
| one_logger and wandb hooks             | they would publish the temporary path                                      |
"""

from __future__ import annotations

import copy
import inspect
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mindio_tft_patch.adaptors.megatron import promote
from mindio_tft_patch.adaptors.porting.survivors import SurvivorsWorld
from mindio_tft_patch.errors import DumpError

log = logging.getLogger("mindio_tft_patch.dump")

_MISSING = object()
_RERUN_KEY = "rerun_state_machine_state"


def checkpointing_module() -> Any:
    """megatron.training.checkpointing."""
    from megatron.training import checkpointing

    return checkpointing


@contextmanager
def saving_into(folder: Path, args: Any, world: SurvivorsWorld, *, writes_model: bool, job_size: int) -> Iterator[None]:
    """Prepare Megatron; `world` must be swapped in.

    Args:
        writes_model: this rank writes the model file of its model-parallel position (`torch` format).
        job_size: ranks of the whole job, dead ones included.
    """
    module = checkpointing_module()
    with ExitStack() as undo:

        def override(target: Any, name: str, value: Any) -> None:
            # From vars first: a static method of a class must be put back as one.
            before = vars(target).get(name, _MISSING)
            if before is _MISSING:
                before = getattr(target, name, _MISSING)
            if before is _MISSING:
                return  # this Megatron has no such thing
            undo.callback(setattr, target, name, before)
            setattr(target, name, value)

        _override_args(args, folder, module, override)
        override(module, "get_rng_state", _rng_among_survivors(module, args.data_parallel_random_init, world))
        override(args, "data_parallel_random_init", False)
        _override_hooks(module, override)
        if args.ckpt_format == "torch":
            rank = 0 if writes_model else 1
            override(module.mpu, "get_data_parallel_rank", lambda *_, **__: rank)
            override(module.mpu, "get_expert_data_parallel_rank", lambda *_, **__: rank)
        else:
            # The order in which Megatron would prefer them: of two holders, expert-parallel rank 0 first.
            position = (module.mpu.get_expert_model_parallel_rank(), module.mpu.get_data_parallel_rank())
            save = _save_promoted(module.dist_checkpointing.save, world, job_size, position)
            override(module.dist_checkpointing, "save", save)
            override(module, "FullyParallelSaveStrategyWrapper", lambda strategy, *_, **__: strategy)
            _override_writers(override)
        yield


def _override_args(args: Any, folder: Path, module: Any, override: Callable[[Any, str, Any], None]) -> None:
    of_the_job = copy.copy(args)
    original = module.generate_state_dict

    def generate_state_dict(*positional: Any, **named: Any) -> Any:
        state = original(*positional, **named)
        state["args"] = of_the_job
        return state

    override(module, "generate_state_dict", generate_state_dict)
    override(args, "save", str(folder))
    override(args, "async_save", False)
    override(args, "ckpt_assume_constant_structure", False)


def _override_hooks(module: Any, override: Callable[[Any, str, Any], None]) -> None:
    override(module, "on_save_checkpoint_start", lambda *_, **__: None)
    override(module, "on_save_checkpoint_success", lambda *_, **__: None)
    wandb = getattr(module, "wandb_utils", None)
    if wandb is not None:
        override(wandb, "on_save_checkpoint_success", lambda *_, **__: None)


def _rng_among_survivors(module: Any, differs: bool, world: SurvivorsWorld) -> Callable[..., Any]:
    """Megatron's get_rng_state, with one state for each data-parallel rank where they differ."""
    original = module.get_rng_state
    mpu = module.mpu
    position = (mpu.get_pipeline_model_parallel_rank(), mpu.get_tensor_model_parallel_rank())
    rank, size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()

    def get_rng_state(*positional: Any, **named: Any) -> Any:
        result = original(*positional, **named)
        if not differs or size == 1:
            return result
        states = result.data if hasattr(result, "data") else result
        gathered = {of: state for place, of, state in world.gather((position, rank, states[0])) if place == position}
        dead = [one for one in range(size) if one not in gathered]
        if dead:
            log.warning(
                "--data-parallel-random-init: the random state of data-parallel ranks %s is lost with them; after a"
                " restart they take that of rank %d",
                dead,
                rank,
            )
        states[:] = [gathered.get(one, states[0]) for one in range(size)]
        return result

    return get_rng_state


def _save_promoted(
    original: Callable[..., Any], world: SurvivorsWorld, job_size: int, position: tuple[int, int]
) -> Callable[..., Any]:
    from megatron.core.dist_checkpointing.mapping import apply_factories

    parameters = inspect.signature(original).parameters

    def save(state: Any, *positional: Any, **named: Any) -> Any:
        apply_factories(state)
        _complete_rerun_state(state, world, job_size)
        entries = list(promote.sharded_entries(state))
        offers = world.gather(([promote.describe(entry) for entry in entries], position))
        held = [shards for shards, _ in offers]
        lacking = promote.uncovered(held)
        if lacking:
            raise DumpError(
                f"the survivors do not hold all of {len(lacking)} entries of the checkpoint, e.g. {lacking[:3]}"
            )
        promote.mark(entries, promote.assign(held, [place for _, place in offers]), world.number)
        if "validate_access_integrity" in parameters:
            named["validate_access_integrity"] = False  # just established, at the cost of one exchange
        return original(state, *positional, **named)

    return save


def _complete_rerun_state(state: Any, world: SurvivorsWorld, job_size: int) -> None:
    """Newer releases save one object for each rank of the job; give the dead ranks the one of the first survivor.

    Outside of a pending rerun these objects hold nothing but defaults.
    """
    for entry in list(promote.sharded_entries(state)):
        if entry.key == _RERUN_KEY and tuple(entry.global_shape) == (len(world.ranks),):
            entry.global_shape, entry.global_offset = (job_size,), (world.rank,)
            absent = [rank for rank in range(job_size) if rank not in world.ranks] if world.leads else []
            for rank in absent:
                state[f"{_RERUN_KEY}_{rank}"] = replace(entry, global_offset=(rank,))


def _override_writers(override: Callable[[Any, str, Any], None]) -> None:
    """Write in threads of this process; forking or spawning writers costs seconds and proves nothing here."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    override(filesystem_async, "_results_queue", queue.Queue())
    writer = filesystem_async.FileSystemWriterAsync
    if not hasattr(writer, "write_preloaded_data_multiproc"):
        return  # newer releases use threads anyway

    def write(transforms: Any, rank: int, buckets: list[Any], results: Any) -> None:
        """Same contract as write_preloaded_data_multiproc: results by worker, or the exception, into `results`."""
        outcomes: queue.Queue[tuple[int, Any]] = queue.Queue()
        open_jobs: queue.Queue[int] = queue.Queue()
        threads = []
        for number, bucket in enumerate(buckets):
            open_jobs.put(number)
            job = (transforms, number, bucket, outcomes, open_jobs, True)
            threads.append(threading.Thread(target=writer.write_preloaded_data, args=job, name=f"tft-dump-{number}"))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        by_worker = dict(outcomes.get_nowait() for _ in buckets)
        failed = next((one for one in by_worker.values() if isinstance(one, Exception)), None)
        results.put(failed if failed is not None else by_worker)

    override(writer, "write_preloaded_data_multiproc", staticmethod(write))
    from megatron.core.dist_checkpointing.strategies.base import AsyncSaveShardedStrategy

    override(AsyncSaveShardedStrategy, "save", _save_in_this_process)


def _save_in_this_process(strategy: Any, state: Any, folder: Any) -> None:
    """A synchronous save of core_v0.12, which would fork for it, although it waits for the child at once."""
    request = strategy.async_save(state, folder)
    if request.async_fn is not None:
        arguments = list(request.async_fn_args)
        if request.preload_fn is not None:
            arguments[1] = request.preload_fn()  # copies to host memory what is on the device
        request.async_fn(*arguments, **request.async_fn_kwargs)
    dist.barrier()
    for finish in request.finalize_fns:
        finish()
