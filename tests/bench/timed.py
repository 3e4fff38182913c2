"""A rank of real Megatron writes down when its steps begin and end, and a digest of its state at the end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wrapt
from support.final_state import write_state
from support.inject import collect_writes_in_this_process

from bench.step_writer import FOLDER, StepWriter


def take_part(environ: Mapping[str, str]) -> None:
    """Call it before the training script."""
    from megatron.core.models.gpt import GPTModel
    from megatron.training import training
    from megatron.training.global_vars import get_args

    collect_writes_in_this_process()
    rank, world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    writer = StepWriter(environ, rank)

    passes = 0

    def around_forward(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        nonlocal passes
        passes += 1
        return wrapped(*args, **kwargs)

    def around_step(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        step, passes_before = get_args().curr_iteration + 1, passes
        began = writer.begin(step)
        result = wrapped(*args, **kwargs)
        # Without a forward pass it was no step: after a fault the plugin may repeat the end of a completed one.
        if passes > passes_before:
            writer.end(step, began, rank=rank, world=world)
        return result

    def around_train(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        write_state(Path(environ[FOLDER]) / f"state-{rank}.json", *args[1:4])
        return result

    GPTModel.forward = wrapt.FunctionWrapper(GPTModel.forward, around_forward)
    # Outside of the plugin's own wrappers, if there are any.
    training.train_step = wrapt.FunctionWrapper(training.train_step, around_step)
    training.train = wrapt.FunctionWrapper(training.train, around_train)
