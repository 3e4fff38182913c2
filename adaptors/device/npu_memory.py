"""Memory errors of an Ascend NPU: what the runtime's answers and messages mean.

A rank with a memory error is always refilled from its replica, whatever kind of memory was hit: also where only
temporaries were, for which computing the step again would do. That costs a copy and needs no judgement. The kind goes
into the log and into the detail of the fault. One kind ends the recovery in place: memory that torch did not allocate
(the runtime's own) is not made whole by anything that we could fill.

Facts, from torch_npu's source (csrc/npu/Module.cpp, csrc/core/npu/NPUException.cpp, NPUCachingAllocator.cpp):

- `check_uce_in_memory` answers 0: no error recorded; 1: the address is not in torch's pool; 2: it was in the pool and
  is gone after the cache was emptied, so only temporaries had it; 3: a living tensor has it, and always after a
  multi-bit ECC error. It waits for the device: call it after stop_device only. For an address that a living tensor has,
  it marks the block "unsafe".
- `restart_device` repairs the recorded addresses and forgets them: ask first. After it an address is good again, its
  content is lost. A block loses its mark when it is allocated anew; operators refuse a marked block as input.
"""

from __future__ import annotations

import enum
import re

# torch_npu itself looks for "time us= <digits>." in the runtime's message and appends "time is <digits>"; MindIO looks
# for "time us=<digits>".
_TIME = re.compile(r"time us\s*=\s*(\d+)|time is\s*(\d+)")
# Appended on recent chips: aclrtErrorType, as a decimal number or 0xFFFF.
_DEVICE_ERROR = re.compile(r"device error type\s*((?:0x)?[0-9a-f]+)", re.IGNORECASE)
_DEVICE_ERROR_NAMES = {"1": "memory", "2": "L2 cache", "3": "AI core", "4": "link"}
# Numbers: ACL_ERROR_RT_DEVICE_MEM_ERROR and ACL_ERROR_RT_HBM_MULTI_BIT_ECC_ERROR of the Ascend runtime.
_MESSAGES = (
    (("HBM MULTI BIT ECC", "error code is 507054"), "multi-bit ECC error of on-chip memory"),
    (("UCE ERROR", "error code is 507053"), "uncorrectable error in on-chip memory"),
    (("unsafe data in the input tensor",), "use of memory that an earlier error has hit"),
)


class MemoryKind(enum.Enum):
    """What a memory error has hit. The value is for people."""

    NONE = "no memory error recorded"
    FOREIGN = "memory that torch did not allocate; nothing can refill it"
    TEMPORARY = "temporaries only; refilled from the replica all the same"
    STATE = "memory in use by model or optimizer; refilled from the replica"
    UNKNOWN = "an answer of the runtime that is not documented; refilled from the replica"


_KINDS = {0: MemoryKind.NONE, 1: MemoryKind.FOREIGN, 2: MemoryKind.TEMPORARY, 3: MemoryKind.STATE}


def kind_of(answer: object) -> MemoryKind:
    """What an answer of `check_uce_in_memory` means."""
    return _KINDS.get(answer, MemoryKind.UNKNOWN) if isinstance(answer, int) else MemoryKind.UNKNOWN


def time_of(message: str) -> int | None:
    """Microseconds of the device's clock at which a multi-bit ECC error happened; None where the message has none.

    The clock is that of `torch.npu.Event.recorded_time()`, not that of the host.
    """
    found = _TIME.search(message)
    return int(found.group(1) or found.group(2)) if found else None


def describe(message: str) -> str:
    """One line about the memory error that an exception's message speaks of; empty when it speaks of none."""
    text = next((text for patterns, text in _MESSAGES if any(pattern in message for pattern in patterns)), "")
    if not text:
        return ""
    moment = time_of(message)
    if moment is not None:
        text += f", at {moment} us of the device's clock"
    device_error = _DEVICE_ERROR.search(message)
    if device_error is not None:
        code = device_error.group(1)
        name = _DEVICE_ERROR_NAMES.get(code)
        text += f", device error type {code}" + (f" ({name})" if name else "")
    return text
