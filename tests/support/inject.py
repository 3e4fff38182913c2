"""Observes one rank of a test job: writes a trace of moments and the final state. The faults of TFT_INJECT are the
product's own (adaptors/injection). Everything goes below TFT_TEST_FOLDER:

    pid-<rank>             process id
    pids-<rank>.txt        all processes that have been this rank, one a line
    moments-<rank>.txt     "<moment> <completed step>", one a line, written before the moment's fault happens
    state-<rank>.json      digest of the final state (support.final_state), when train() has returned
    resources-<rank>.jsonl what the process holds between two steps; only with TFT_TEST_RESOURCES=1
"""

from __future__ import annotations

import faulthandler
import json
import os
import queue
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import wrapt

import mindio_tft_patch
from support.final_state import write_state

FOLDER = "TFT_TEST_FOLDER"
RESOURCES = "TFT_TEST_RESOURCES"
# Kept: what the trace holds of them is of no use, and there are many.
_UNTRACED = frozenset({"loader", "forward", "backward", "evaluate_forward", "save_write", "dump_write", "in_update"})


def arm(environ: Mapping[str, str]) -> None:
    """Call it after `mindio_tft_patch.activate` and before the training script."""
    if FOLDER not in environ:
        return
    folder, rank = Path(environ[FOLDER]), int(environ["RANK"])
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # for whoever wonders where a rank has got stuck
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    _append(folder / f"pids-{rank}.txt", str(os.getpid()))
    _state_at_the_end(folder / f"state-{rank}.json")
    if "--async-save" not in sys.argv:
        collect_writes_in_this_process()
    installation = mindio_tft_patch.installation()
    if installation is None:
        return
    # First of all listeners: the trace must have the moment at which the injector ends the process.
    board = installation.session.board
    board._listeners.insert(0, _tracer(folder / f"moments-{rank}.txt"))
    if environ.get(RESOURCES) == "1":
        board.listen(_sampler(folder / f"resources-{rank}.jsonl"))


def collect_writes_in_this_process() -> None:
    """Megatron's first save starts a process for a queue, which imports everything again: five seconds for nothing."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if hasattr(filesystem_async, "get_write_results_queue"):  # core_v0.12 writes in forked processes and needs its own
        filesystem_async._results_queue = queue.Queue()


def _tracer(path: Path) -> Callable[[str, int], None]:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def trace(moment: str, step: int) -> None:
        if moment not in _UNTRACED:
            os.write(descriptor, f"{moment} {step}\n".encode())

    return trace


def _sampler(path: Path) -> Callable[[str, int], None]:
    from torch.distributed import distributed_c10d

    pages = os.sysconf("SC_PAGE_SIZE")

    def sample(moment: str, step: int) -> None:
        if moment != "step_begin":
            return
        held = {
            "pid": os.getpid(),
            "step": step,
            "bytes": int(Path("/proc/self/statm").read_text().split()[1]) * pages,
            "threads": len(os.listdir("/proc/self/task")),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "groups": len(distributed_c10d._world.pg_map),
        }
        _append(path, json.dumps(held))

    return sample


def _append(path: Path, line: str) -> None:
    with path.open("a") as stream:
        stream.write(line + "\n")


def _state_at_the_end(path: Path) -> None:
    from megatron.training import training

    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        write_state(path, *args[1:4])
        return result

    training.train = wrapt.FunctionWrapper(training.train, wrapper)
