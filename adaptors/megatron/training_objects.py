"""The objects of a running train()."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mindio_tft_patch.adaptors.megatron.past import Past
from mindio_tft_patch.adaptors.megatron.train_state import TrainState


@dataclass
class Training:
    """What train() was called with, and the record of its steps.

    model: list of DDP-wrapped model chunks. checkpointing_context: as pretrain() made it.
    past: checkpoints that are the job's own.
    """

    args: Any
    model: list[Any]
    optimizer: Any
    scheduler: Any
    state: TrainState
    checkpointing_context: Any = None
    past: Past = field(default_factory=Past)
