"""support.inject for the Megatron-LM of 2023, whose modules have other names. Beyond the schedule of TFT_INJECT:

TFT_TEST_RAISE="1:10:UCE ERROR;0:10:FORCE STOP"   rank, step, text of a RuntimeError raised there, once
    TFT_TEST_KILL="2:13"                               rank and step of a SIGKILL there, once
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wrapt

import mindio_tft_patch
from support import final_state, inject

RAISE = "TFT_TEST_RAISE"
KILL = "TFT_TEST_KILL"


def arm(environ: Mapping[str, str]) -> None:
    """Call it after `import mindio_tft_patch` and before the training script."""
    folder, rank = Path(environ[inject.FOLDER]), int(environ["RANK"])
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    inject._append(folder / f"pids-{rank}.txt", str(os.getpid()))
    _state_at_the_end(folder / f"state-{rank}.json")
    _raise_in_training(environ.get(RAISE, ""), environ.get(KILL, ""), rank, folder)
    installation = mindio_tft_patch.installation()
    if installation is not None:
        installation.session.board._listeners.insert(0, inject._tracer(folder / f"moments-{rank}.txt"))


def _state_at_the_end(path: Path) -> None:
    from megatron import get_args, training

    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        megatron_args = get_args()
        if not hasattr(megatron_args, "skipped_train_samples"):  # without the plugin nobody counts them
            megatron_args.skipped_train_samples = 0
        state = dict(final_state._entries(megatron_args, *args[1:4]))
        # Apex counts the steps of a group, torch those of a parameter.
        state["steps"] = str([group.get("step") for group in args[2].param_groups])
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(state))
        unfinished.rename(path)
        return result

    training.train = wrapt.FunctionWrapper(training.train, wrapper)


def _raise_in_training(schedule: str, kill: str, rank: int, folder: Path) -> None:
    from megatron import get_args

    entries = [entry.split(":", 2) for entry in schedule.split(";") if entry]
    wanted = {int(step): text for of, step, text in entries if int(of) == rank}
    if kill and int(kill.split(":", maxsplit=1)[0]) == rank:
        wanted[int(kill.split(":")[1])] = ""
    if not wanted:
        return

    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        step = get_args().curr_iteration + 1
        fired = folder / f"raised-{rank}-{step}"  # once in a job, whatever process this rank is
        if step in wanted and not fired.exists():
            fired.touch()
            wrapped(*args, **kwargs)
            if not wanted[step]:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError(wanted[step])
        return wrapped(*args, **kwargs)

    # Where the gradients are there and nothing has been updated yet.
    from megatron.optimizer.optimizer import MegatronOptimizer

    original = MegatronOptimizer.allreduce_embedding_grads
    MegatronOptimizer.allreduce_embedding_grads = wrapt.FunctionWrapper(original, wrapper)
