"""Phase clean: after the main thread has left training, make this rank's own state consistent at the target step."""

from __future__ import annotations

from mindio_tft_patch.adaptors.device.interface import Device
from mindio_tft_patch.adaptors.megatron.gate import CommitGate
from mindio_tft_patch.processor.handlers import Outcome
from mindio_tft_patch.protocol.messages import Plan


def clean(plan: Plan, *, device: Device, gate: CommitGate, rank: int) -> Outcome:
    """Bring the optimizer state of this rank to `plan.target_step` without any other rank.

    A rank whose state will come from a replica, or from a checkpoint, only forgets the step that it was in.

    Raises:
        RecoveryError: the target step cannot be reached here.
    """
    device.clean()
    gate.settle(plan, rank)
    device.synchronize()
    return Outcome()
