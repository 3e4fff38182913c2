"""Faults on purpose (TFT_INJECT) in a job of a framework with handlers of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mindio_tft_patch.adaptors.porting.gate import StepGate
from mindio_tft_patch.adaptors.porting.protection import Protection
from mindio_tft_patch.config import Config
from mindio_tft_patch.errors import ConfigError
from mindio_tft_patch.fault_injection import VARIABLE
from mindio_tft_patch.processor.progress import ProgressBoard


@dataclass(frozen=True)
class Objects:
    """What injected memory errors reach into. optimizer: of torch, or has one as its attribute `optimizer`."""

    model: Sequence[torch.nn.Module]
    optimizer: Any


@dataclass(frozen=True)
class Ported:
    """A rank as the injection sees it."""

    protection: Protection
    gate: StepGate
    training: Objects

    @property
    def config(self) -> Config:
        """Flags and variables."""
        return self.protection.config

    @property
    def board(self) -> ProgressBoard:
        """Where moments come from."""
        return self.protection.board

    @property
    def replaces(self) -> bool:
        """This process has taken the place of a lost one."""
        return self.protection.replaces


def inject_faults(
    protection: Protection,
    gate: StepGate,
    *,
    model: Sequence[torch.nn.Module],
    optimizer: Any,
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Let the schedule of TFT_INJECT happen to this rank; call it when the model exists. Without one nothing is done.

    The moments that a schedule can name, and who announces them:

        by themselves      those around the gate, "gather" (behind it) and the phases of a recovery
        boundary()         "between"
        torch              "forward", "backward", "in_update", the writes of a save ("save", "dump")
        Rewindable, torch's DataLoader      "loader"
        the trainer        "loader" when its data is something else: `board.moment("loader")`; "save_begin":
                           `board.moment("save")`; "save_end": `board.moment("save_end")`
        nobody             "setup"

    Args:
        optimizer: the torch optimizer of this rank's shard, or an object that has it as its attribute `optimizer`;
            None: this rank has none.

    Raises:
        ConfigError: the schedule makes no sense, or `optimizer` is something else.
    """
    if protection.active and environ.get(VARIABLE):
        wraps = hasattr(optimizer, "optimizer") or hasattr(optimizer, "chained_optimizers")
        if optimizer is not None and not wraps and not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"inject_faults(optimizer=...): {type(optimizer).__name__} is no torch optimizer and has none.",
                change="Hand over the torch.optim.Optimizer of this rank, or an object with an attribute `optimizer`.",
            )
        # Only now: a job without faults on purpose imports nothing of it.
        from mindio_tft_patch.adaptors.injection.arm import arm_framework
        from mindio_tft_patch.adaptors.porting.announced import announce

        arm_framework(Ported(protection, gate, Objects(model, optimizer)), environ)
        announce(protection.board)
