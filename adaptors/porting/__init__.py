"""What a framework of one's own needs to survive faults; docs/porting.md is the worked example.

Everything named here is public. A framework implements `Handlers` (one method for each phase of a recovery) and calls
`Protection` (connection to the controller, device, guard) and `StepGate` (the commit gate); the rest are parts from
which handlers are put together. Run with TFT_ADAPTOR=own, so that the import does not patch Megatron.
"""

from __future__ import annotations

from mindio_tft_patch.adaptors.device.interface import Device
from mindio_tft_patch.adaptors.porting.copies import check_copies, source_of, transfers
from mindio_tft_patch.adaptors.porting.digest import digest_of
from mindio_tft_patch.adaptors.porting.faults import inject_faults
from mindio_tft_patch.adaptors.porting.gate import StepGate
from mindio_tft_patch.adaptors.porting.marks import Marks
from mindio_tft_patch.adaptors.porting.optimizer_state import receive_optimizer, send_optimizer, tensors_of
from mindio_tft_patch.adaptors.porting.protection import Protection
from mindio_tft_patch.adaptors.porting.replica_layout import holders, parts
from mindio_tft_patch.adaptors.porting.rewindable import Rewindable
from mindio_tft_patch.adaptors.porting.survivors import SurvivorsWorld
from mindio_tft_patch.adaptors.porting.transfer import receive_object, receive_tensors, send_object, send_tensors
from mindio_tft_patch.adaptors.porting.write_together import write_together
from mindio_tft_patch.errors import DumpError, Interrupted, RecoveryError
from mindio_tft_patch.processor.detect import Detector, Rule
from mindio_tft_patch.processor.handlers import Handlers, Outcome
from mindio_tft_patch.processor.progress import ProgressBoard
from mindio_tft_patch.protocol.messages import CommitState, Plan, ReplicaSet, ShardSource
from mindio_tft_patch.protocol.phases import Activity, FaultKind, Phase, Strategy

__all__ = [
    "Activity",
    "CommitState",
    "Detector",
    "Device",
    "DumpError",
    "FaultKind",
    "Handlers",
    "Interrupted",
    "Marks",
    "Outcome",
    "Phase",
    "Plan",
    "ProgressBoard",
    "Protection",
    "RecoveryError",
    "ReplicaSet",
    "Rewindable",
    "Rule",
    "ShardSource",
    "StepGate",
    "Strategy",
    "SurvivorsWorld",
    "check_copies",
    "digest_of",
    "holders",
    "inject_faults",
    "parts",
    "receive_object",
    "receive_optimizer",
    "receive_tensors",
    "send_object",
    "send_optimizer",
    "send_tensors",
    "source_of",
    "tensors_of",
    "transfers",
    "write_together",
]
