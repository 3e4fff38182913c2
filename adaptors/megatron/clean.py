"""Phase clean: after the main thread has left training, make this rank's own state consistent at the target step."""

from __future__ import annotations

from mindio_tft_patch.adaptors.device.interface import Device
from mindio_tft_patch.adaptors.megatron.gate import CommitGate
from mindio_tft_patch.processor.handlers import Outcome
from mindio_tft_patch.protocol.messages import Plan
from mindio_tft_patch.protocol.phases import Strategy


def clean(plan: Plan, *, device: Device, gate: CommitGate, rank: int) -> Outcome:
    """Bring the optimizer state of this rank to `plan.target_step` without any other rank.

    A rank whose state will come from a replica, or from a checkpoint, only forgets the step that it was in.

    Raises:
        RecoveryError: the target step cannot be reached here.
    """
    device.clean()
    # Past the target are only ranks that will put back what they have kept of it: later steps are corrupt.
    past = plan.strategy is Strategy.DUMP and gate.completed > plan.target_step
    if plan.strategy is not Strategy.RELOAD and rank not in plan.faulty and not past:
        gate.finish(plan.target_step)
    gate.abandon()
    device.synchronize()
    return Outcome()
