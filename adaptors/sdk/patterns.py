"""What a RuntimeError of training means: the SDK's table, first pattern that occurs in the message wins.

A row has a pattern, what it is called, and what is reported under that name. `tft_register_exception_handler` adds
rows: its function gets the message and returns the name. What no row knows is looked up in our own rules
(processor.detect), because a framework over gloo or NCCL has no messages of a vendor runtime.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from mindio_tft_patch.adaptors.sdk import checks
from mindio_tft_patch.adaptors.sdk.enums import ReportState
from mindio_tft_patch.adaptors.sdk.mainline import Report
from mindio_tft_patch.adaptors.sdk.uce_time import UpdateTimes, error_time
from mindio_tft_patch.errors import ConfigError
from mindio_tft_patch.processor.detect import Detector
from mindio_tft_patch.protocol.phases import FaultKind

_CALL = "tft_register_exception_handler"
_OTHER = "OTHER"
_REPAIRABLE = "HBM MULTI BIT ECC can repair"
_NOT_REPAIRABLE = "HBM MULTI BIT ECC can't repair"
_ERROR_CODE = re.compile(r"\bdevice error type\s*([0-9a-f]+)\b", re.IGNORECASE)

Naming = Callable[[str], str]

# What each state is to the controller. None: nothing is wrong with this rank.
KINDS: dict[ReportState, FaultKind | None] = {
    ReportState.RS_NORMAL: FaultKind.COLLATERAL,
    ReportState.RS_RETRY: FaultKind.MEMORY,
    ReportState.RS_UCE: FaultKind.MEMORY,
    ReportState.RS_UCE_CORRUPTED: FaultKind.MEMORY,
    ReportState.RS_HCCL_FAILED: FaultKind.NETWORK,
    ReportState.RS_INIT_FINISH: None,
    ReportState.RS_PREREPAIR_FINISH: None,
    ReportState.RS_STEP_FINISH: None,
    ReportState.RS_UNKNOWN: FaultKind.EXCEPTION,
}

# States after which no rank's numbers can be trusted: only a checkpoint is better.
SPREADING = frozenset({ReportState.RS_RETRY, ReportState.RS_UCE_CORRUPTED})
MEMORY_STATES = frozenset({ReportState.RS_UCE, ReportState.RS_UCE_CORRUPTED})
RETURNED_STATES = frozenset({ReportState.RS_INIT_FINISH, ReportState.RS_PREREPAIR_FINISH})


@dataclass(frozen=True)
class _Row:
    pattern: str
    name: Naming
    state: ReportState


class Patterns:
    """The table of one process.

    Args:
        times: of the last optimizer update.

    Attributes:
        retries: enable_uce; without it the faults that a retry would repair count as unknown ones.
        detector: our own rules.
    """

    def __init__(self, times: UpdateTimes) -> None:
        self.retries = True
        self.detector = Detector()
        self._times = times
        self._states = {_REPAIRABLE: ReportState.RS_UCE, _NOT_REPAIRABLE: ReportState.RS_UCE_CORRUPTED}
        self._rows: dict[str, _Row] = {}
        for pattern, state, repairing in (
            ("UCE ERROR", ReportState.RS_UCE, True),
            ("HBM MULTI BIT ECC", ReportState.RS_UCE, True),
            ("FORCE STOP", ReportState.RS_NORMAL, False),
            ("ARF FINISH", ReportState.RS_PREREPAIR_FINISH, False),
            ("STEP FINISH", ReportState.RS_STEP_FINISH, False),
            ("HCCL OP RETRY FAILED", ReportState.RS_HCCL_FAILED, True),
            ("SUSPECT REMOTE ERROR", ReportState.RS_HCCL_FAILED, True),
            ("UB LINK ERROR", ReportState.RS_HCCL_FAILED, True),
            ("HCCS LINK ERROR", ReportState.RS_HCCL_FAILED, True),
        ):
            self._rows[pattern] = _Row(pattern, self._named(pattern, repairing), state)

    def _named(self, pattern: str, repairing: bool) -> Naming:
        def name(message: str) -> str:
            if repairing and not self.retries:
                return _OTHER
            if pattern == "HBM MULTI BIT ECC":
                return _REPAIRABLE if self._times.repairable(error_time(message)) else _NOT_REPAIRABLE
            return pattern

        return name

    def add(self, fault_pattern: str, fault_type: str, fault_handle: Naming) -> None:
        """Add a row, or replace the one with the same pattern.

        Raises:
            ConfigError: the pattern is empty, or fault_type is no name of ReportState.
            TypeError: fault_handle cannot be called.
        """
        if not isinstance(fault_pattern, str) or not fault_pattern:
            raise ConfigError(f"{_CALL}: fault_pattern is {fault_pattern!r}.", change="Pass words of the message.")
        if fault_type not in ReportState.__members__:
            names = ", ".join(ReportState.__members__)
            raise ConfigError(f"{_CALL}: fault_type is {fault_type!r}.", change=f"Pass one of {names}.")
        checks.function(_CALL, "fault_handle", fault_handle)
        state = ReportState[fault_type]
        self._rows[fault_pattern] = _Row(fault_pattern, fault_handle, state)
        self._states[fault_pattern] = state

    def report_of(self, error: BaseException) -> Report:
        """What an exception of the training function means."""
        state, name = self._state_of(error)
        kind = KINDS[state]
        if state is ReportState.RS_UNKNOWN:
            kind = self.detector.classify(error)
        code = _ERROR_CODE.search(str(error))
        detail = self.detector.describe(error)
        more = [name] if name and name not in detail else []
        more += [code[0]] if code and code[0] not in detail else []
        return Report(state, kind, "; ".join([detail, *more]), error)

    def _state_of(self, error: BaseException) -> tuple[ReportState, str]:
        if not isinstance(error, RuntimeError):
            return ReportState.RS_UNKNOWN, ""
        message = str(error)
        row = next((row for row in self._rows.values() if row.pattern in message), None)
        if row is None:
            return ReportState.RS_UNKNOWN, ""
        name = row.name(message)
        if name == _OTHER:
            return ReportState.RS_UNKNOWN, ""
        # A name that no row has introduced means what the row itself was registered for.
        return self._states.get(name, row.state), name
