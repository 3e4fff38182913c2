"""What tests put around MindSpeed-LLM's training loop, once its patcher has run: faults, traces, the final state."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import wrapt

from mindio_tft_patch.adaptors.mindspeed_llm.detection import PATCHER
from support import inject

RAISE = "TFT_TEST_RAISE"


def arm(environ: Mapping[str, str]) -> None:
    """Call it after `import mindio_tft_patch` and before the training script."""
    if inject.FOLDER not in environ:
        return
    wrapt.register_post_import_hook(lambda _module: _arm(environ), PATCHER)


def _arm(environ: Mapping[str, str]) -> None:
    from mindspeed_llm.training import training

    inject.arm(environ)
    # inject.arm has wrapped the name in Megatron's module; MindSpeed-LLM calls the one in its own.
    from megatron.training import training as megatron_training

    training.train = megatron_training.train
    if environ.get(RAISE):
        _raise_in_front_of_step(training, environ)


def _raise_in_front_of_step(training: ModuleType, environ: Mapping[str, str]) -> None:
    step, rank, text = environ[RAISE].split(":", 2)
    happened = Path(environ[inject.FOLDER]) / f"raised-{environ['RANK']}"

    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        from megatron.training import get_args

        if get_args().curr_iteration == int(step) and not happened.exists():
            happened.touch()
            mine = int(environ["RANK"]) == int(rank)
            if text == "SIGKILL":
                if mine:
                    os.kill(os.getpid(), signal.SIGKILL)
                return wrapped(*args, **kwargs)  # the others find out by themselves
            if mine and "UCE" in text:
                _hit_memory()
            raise RuntimeError(text if mine else "FORCE STOP")
        return wrapped(*args, **kwargs)

    training.train_step = wrapt.FunctionWrapper(training.train_step, wrapper)


def _hit_memory() -> None:
    """The device has to agree that there is an error: of the kind after which model and optimizer are made anew."""
    from torch_npu.runtime import runtime

    runtime.memory_error = 3
