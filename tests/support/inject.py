"""Arms one rank of a test job: injects the faults of TFT_INJECT, writes a trace of moments and the final state.

Moments that the product's board does not have are added by wrapping Megatron here. Everything goes below
TFT_TEST_FOLDER:

    pid-<rank>           process id
    moments-<rank>.txt   "<moment> <completed step>", one a line, written before the moment's fault happens
    state-<rank>.json    digest of the final state (support.final_state), when train() has returned
"""

from __future__ import annotations

import faulthandler
import os
import queue
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import wrapt

import mindio_tft_patch
from mindio_tft_patch.fault_injection import VARIABLE, FaultInjector, read_schedule
from mindio_tft_patch.protocol.phases import Activity
from support.final_state import write_state

FOLDER = "TFT_TEST_FOLDER"
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
    _state_at_the_end(folder / f"state-{rank}.json")
    if "--async-save" not in sys.argv:
        _collect_writes_in_this_process()
    installation = mindio_tft_patch.installation()
    if installation is None:
        return
    session = installation.session
    session.board.listen(_tracer(folder / f"moments-{rank}.txt"))
    session.board.listen(FaultInjector(read_schedule(environ.get(VARIABLE, "")), rank))
    _add_moments(session)


def _collect_writes_in_this_process() -> None:
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


def _add_moments(session: Any) -> None:
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.rerun_state_machine import RerunDataIterator
    from torch.optim.optimizer import register_optimizer_step_post_hook

    board = session.board

    def before(owner: Any, name: str, moment: Callable[[], str | None]) -> None:
        original = getattr(owner, name)

        def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            happening = moment()
            if happening is not None:
                board.moment(happening)
            return wrapped(*args, **kwargs)

        setattr(owner, name, wrapt.FunctionWrapper(original, wrapper))

    def of_forward() -> str:
        return "evaluate_forward" if board.activity is Activity.EVALUATE else "forward"

    def of_write() -> str | None:
        return {Activity.SAVE: "save_write", Activity.RECOVERY: "dump_write"}.get(board.activity)

    before(schedules, "forward_step", of_forward)
    before(schedules, "backward_step", lambda: "backward")
    before(RerunDataIterator, "__next__", lambda: "loader")
    before(torch, "save", of_write)
    register_optimizer_step_post_hook(lambda *_: board.moment("in_update"))

    def echo(moment: str, step: int) -> None:
        if moment == "save_end":  # for ranks that have written nothing
            board.moment("save_write")

    board.listen(echo)
    barrier = session.gate._barrier

    def gate() -> None:
        barrier()
        board.moment("barrier")

    session.gate._barrier = gate


def _state_at_the_end(path: Path) -> None:
    from megatron.training import training

    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        write_state(path, *args[1:4])
        return result

    training.train = wrapt.FunctionWrapper(training.train, wrapper)
