"""A real Megatron job whose periodic save is followed by dying-gasp dumps.

Usage: dump_job.py <spec.json> <arguments of pretrain_gpt.py>

The process imports torch and Megatron, hosts the store (which must outlive every rank) and forks the ranks.

At its first periodic save the job first saves as ever (the reference), then walks through the scenarios: in each, the
ranks in `dead` take no part and the others call write_dump into a directory of its own. In the last one the dead ranks
really die. Rank results go to `<out>/result-<scenario>-<rank>.json`.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import queue
import resource
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from mindio_tft_patch.adaptors.device.cpu import install_cpu_stand_in

install_cpu_stand_in()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import mpu  # noqa: E402
from megatron.training import training  # noqa: E402

from mindio_tft_patch.adaptors.megatron import dump, shard_holders  # noqa: E402
from mindio_tft_patch.errors import DumpError  # noqa: E402
from mindio_tft_patch.protocol.messages import Plan, ReplicaSet, ShardSource  # noqa: E402
from mindio_tft_patch.protocol.phases import Strategy  # noqa: E402

# Padding between parameters is uninitialised in a checkpoint; zeros make files comparable.
torch.empty = torch.zeros


def replica_sets(optimizer: Any, copies: int) -> list[ReplicaSet]:
    """Those of all ranks; collective."""
    groups = [("dense", mpu.get_data_parallel_group(with_context_parallel=True))]
    sharded = [one for one in shard_holders.parts(optimizer) if shard_holders.is_sharded(one)]
    if len(sharded) > 1:
        groups.append(("expert", mpu.get_expert_data_parallel_group()))
    own = []
    for name, group in groups:
        ranks = dist.get_process_group_ranks(group)
        half = len(ranks) // copies if sharded else 1
        own += [(name, tuple(ranks[shard::half])) for shard in range(half)]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return [ReplicaSet(name, ranks) for name, ranks in sorted({one for rank in everyone for one in rank})]


def make_plan(sets: list[ReplicaSet], dead: list[int], step: int) -> Plan:
    alive = tuple(rank for rank in range(dist.get_world_size()) if rank not in dead)
    sources = tuple(
        ShardSource(one, next(rank for rank in one.ranks if rank in alive))
        for one in sets
        if set(one.ranks) & set(alive)
    )
    return Plan(Strategy.DUMP, "test", step, faulty=tuple(dead), participants=alive, sources=sources)


def spoil_foreign_shards(optimizer: Any) -> None:
    """As after the local update, before the parameter all-gather: only the own shard of the parameters is new."""
    for part in shard_holders.parts(optimizer):
        if not shard_holders.is_sharded(part):
            continue
        rank, size = part.data_parallel_group.rank(), part.data_parallel_group.size()
        for buffer in part.buffers:
            for bucket in buffer.buckets:
                length = bucket.param_data.numel() // size
                bucket.param_data[: rank * length] = 7.0
                bucket.param_data[(rank + 1) * length :] = 7.0


def inject(failure: str) -> None:
    """Make this rank fail in the middle of writing."""
    real = torch.save
    calls = []

    @functools.wraps(real)
    def save(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) > 1 or kwargs.get("path") or (args and isinstance(args[0], dict)):
            if failure == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if failure == "oserror":
                raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    if failure == "fsize":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    else:
        torch.save = save


def time_torch_save(path: Path, size: int) -> float:
    """Seconds that torch.save and fsync take for as many bytes, while the other ranks do the same."""
    data = torch.ones(max(1, size // 4))
    began = time.monotonic()
    with path.open("wb") as stream:
        torch.save(data, stream)
        stream.flush()
        os.fsync(stream.fileno())
    return time.monotonic() - began


def play(scenario: dict[str, Any], number: int, out: Path, sets: list[ReplicaSet], job: dict[str, Any]) -> None:
    rank = dist.get_rank()
    before = dict(vars(job["args"]))
    job["args"].save = scenario.get("save") or str(out / scenario["name"])
    for name, value in scenario.get("args", {}).items():
        setattr(job["args"], name, value)
    failure = scenario.get("fail", {}).get(str(rank))
    if failure:
        inject(failure)
    if scenario.get("stale"):
        spoil_foreign_shards(job["optimizer"])
    began = time.monotonic()
    result: dict[str, Any] = {}
    try:
        plan = make_plan(sets, scenario["dead"], job["iteration"])
        outcome = dump.write_dump(**job, plan=plan, attempt=number + 1, deadline_seconds=scenario.get("deadline", 60.0))
        result = {"path": outcome.detail, "bytes": outcome.bytes_moved}
    except DumpError as error:
        result = {"error": str(error)}
    result["seconds"] = time.monotonic() - began
    if scenario.get("bench") and "bytes" in result:
        result["torch_save_seconds"] = time_torch_save(out / f"bench-{rank}", result["bytes"])
    if failure == "fsize":
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    (out / f"result-{scenario['name']}-{rank}.json").write_text(json.dumps(result))
    for name, value in before.items():
        setattr(job["args"], name, value)


def after_reference(spec: dict[str, Any], job: dict[str, Any]) -> None:
    out, rank = Path(spec["out"]), dist.get_rank()
    sets = replica_sets(job["optimizer"], spec["copies"])
    for number, scenario in enumerate(spec["scenarios"]):
        last = number == len(spec["scenarios"]) - 1
        if rank in scenario["dead"] and last:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank not in scenario["dead"]:
            play(scenario, number, out, sets, job)
        if not last:
            dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def keep_results_in_process() -> None:
    """Spare each rank Megatron's manager process: it costs seconds to start and outlives a rank that is killed."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    forks = hasattr(filesystem_async.FileSystemWriterAsync, "write_preloaded_data_multiproc")
    filesystem_async._results_queue = multiprocessing.get_context("fork").Queue() if forks else queue.Queue()


def run_rank(spec: dict[str, Any]) -> None:
    original = training.save_checkpoint

    def save_checkpoint(iteration: int, *args: Any, **kwargs: Any) -> None:
        original(iteration, *args, **kwargs)
        model, optimizer, scheduler, flops = args[:4]
        job = {
            "model": model,
            "optimizer": optimizer,
            "opt_param_scheduler": scheduler,
            "iteration": iteration,
            "num_floating_point_operations_so_far": flops,
            "args": training.get_args(),
        }
        after_reference(spec, job)

    training.save_checkpoint = save_checkpoint
    script = Path(__file__).parents[2] / "launch" / "pretrain_gpt.py"
    sys.argv = [str(script), *sys.argv[2:]]
    runpy.run_path(str(script), run_name="__main__")


def fork_rank(rank: int, spec: dict[str, Any]) -> int:
    """Start a rank; returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    status = 3
    try:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        keep_results_in_process()
        run_rank(spec)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> int:
    """Returns how many ranks failed other than by the SIGKILL that the spec asks for."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    size = spec.get("ranks", 4)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port), WORLD_SIZE=str(size))
    os.environ.update(LOCAL_WORLD_SIZE=str(size), TORCHELASTIC_USE_AGENT_STORE="True")
    ranks = {fork_rank(rank, spec): rank for rank in range(size)}
    failed, ends = 0, time.monotonic() + spec.get("timeout", 200.0)
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            ranks.pop(pid)
            failed += status not in (0, signal.SIGKILL)
        elif time.monotonic() > ends or failed:
            for one in ranks:
                os.kill(one, signal.SIGKILL)
            failed += not failed
            ends += 1e9
        else:
            time.sleep(0.02)
    return failed


if __name__ == "__main__":
    sys.exit(main())
