"""The few names by which adaptors.megatron asks Megatron, given to the Megatron-LM of 2023, which has others.

Modules under their later names are the old modules themselves; what the old Megatron does not have (a machine that
runs steps again, a tracker of expert statistics, asynchronous saves) is answered as by a Megatron that does not use it.
Nothing in Megatron reads any of these names.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

from mindio_tft_patch.adaptors.megatron_legacy.data import DataIterator

# later name -> module of 2023
_MOVED = {
    "megatron.training.training": "megatron.training",
    "megatron.training.arguments": "megatron.arguments",
    "megatron.training.initialize": "megatron.initialize",
    "megatron.training.global_vars": "megatron.global_vars",
    "megatron.core.pipeline_parallel.schedules": "megatron.schedules",
}


class _NoRerunMachine:
    """There is no machine that runs a step again; whoever sets its fields changes nothing."""

    def get_mode(self) -> None:
        """No mode."""

    def set_mode(self, mode: Any) -> None:
        """Nothing to set."""


def install() -> None:
    """Add the names. A second call does nothing more.

    Raises:
        ImportError: the Megatron on the path cannot be imported.
    """
    if "megatron.training.training" in sys.modules:
        return
    for later, old in _MOVED.items():
        sys.modules[later] = importlib.import_module(old)
    training = importlib.import_module("megatron.training")
    _add(
        training,
        training=training,
        global_vars=importlib.import_module("megatron.global_vars"),
        checkpointing=_checkpointing(),
        async_utils=SimpleNamespace(_async_calls_queue=None),
        # Counted for a log line that this Megatron does not have.
        num_floating_point_operations=lambda *_: 0.0,
    )
    core = importlib.import_module("megatron.core")
    for name, module in _absent_modules().items():
        sys.modules[f"megatron.core.{name}"] = module
        _add(core, **{name: module})
    _add(core.utils, get_model_config=lambda _chunk: SimpleNamespace())
    _add(core.parallel_state, get_moe_layer_wise_logging_tracker=dict)


def complete_arguments(args: Any) -> None:
    """Give Megatron's arguments the counters and options that came later, as if unused."""
    for name, value in (("skipped_train_samples", 0), ("context_parallel_size", 1), ("num_experts", None)):
        if not hasattr(args, name):
            setattr(args, name, value)


def _absent_modules() -> dict[str, ModuleType]:
    from megatron import global_vars

    machine = _NoRerunMachine()
    calculator = ModuleType("megatron.core.num_microbatches_calculator")
    _add(
        calculator,
        get_num_microbatches=global_vars.get_num_microbatches,
        get_current_global_batch_size=global_vars.get_current_global_batch_size,
        # It leaves no sample out: a batch that does not fit is an error.
        get_current_running_global_batch_size=global_vars.get_current_global_batch_size,
        update_num_microbatches=global_vars.update_num_microbatches,
    )
    rerun = ModuleType("megatron.core.rerun_state_machine")
    _add(
        rerun,
        RerunState=SimpleNamespace(NOT_RUNNING_YET=None),
        get_rerun_state_machine=lambda: machine,
        RerunDataIterator=DataIterator,
    )
    return {"num_microbatches_calculator": calculator, "rerun_state_machine": rerun}


def _checkpointing() -> Any:
    from megatron import checkpointing

    def load_checkpoint(model: Any, optimizer: Any, scheduler: Any, **_: Any) -> tuple[int, float]:
        # Looked up at the call: it is patched.
        return checkpointing.load_checkpoint(model, optimizer, scheduler), 0.0

    return SimpleNamespace(load_checkpoint=load_checkpoint)


def _add(module: Any, **names: Any) -> None:
    for name, value in names.items():
        if not hasattr(module, name):
            setattr(module, name, value)
