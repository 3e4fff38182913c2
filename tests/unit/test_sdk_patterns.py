"""What an exception of training is reported as: the SDK's table, rows of one's own, and our rules for the rest."""

from __future__ import annotations

import pytest

from mindio_tft_patch.adaptors.sdk.enums import ReportState
from mindio_tft_patch.adaptors.sdk.patterns import KINDS, Patterns
from mindio_tft_patch.adaptors.sdk.uce_time import UpdateTimes
from mindio_tft_patch.errors import ConfigError
from mindio_tft_patch.protocol.phases import FaultKind


@pytest.fixture
def times() -> UpdateTimes:
    return UpdateTimes()


@pytest.fixture
def patterns(times: UpdateTimes) -> Patterns:
    return Patterns(times)


@pytest.mark.parametrize(
    ("message", "state", "kind"),
    [
        ("AclError: UCE ERROR in device 3", ReportState.RS_UCE, FaultKind.MEMORY),
        ("FORCE STOP.", ReportState.RS_NORMAL, FaultKind.COLLATERAL),
        ("ARF FINISH", ReportState.RS_PREREPAIR_FINISH, None),
        ("STEP FINISH", ReportState.RS_STEP_FINISH, None),
        ("HCCL OP RETRY FAILED", ReportState.RS_HCCL_FAILED, FaultKind.NETWORK),
        ("SUSPECT REMOTE ERROR", ReportState.RS_HCCL_FAILED, FaultKind.NETWORK),
        ("UB LINK ERROR", ReportState.RS_HCCL_FAILED, FaultKind.NETWORK),
        ("HCCS LINK ERROR", ReportState.RS_HCCL_FAILED, FaultKind.NETWORK),
        ("Other ERROR", ReportState.RS_UNKNOWN, FaultKind.EXCEPTION),
        ("", ReportState.RS_UNKNOWN, FaultKind.EXCEPTION),
    ],
)
def test_a_message_means_what_the_table_says(
    patterns: Patterns, message: str, state: ReportState, kind: FaultKind | None
) -> None:
    report = patterns.report_of(RuntimeError(message))
    assert (report.state, report.kind) == (state, kind)
    assert message in report.detail


@pytest.mark.parametrize("message", ["UCE ERROR", "HCCL OP RETRY FAILED", "SUSPECT REMOTE ERROR", "UB LINK ERROR"])
def test_without_the_switch_what_a_retry_would_repair_is_unknown(patterns: Patterns, message: str) -> None:
    patterns.retries = False
    assert patterns.report_of(RuntimeError(message)).state is ReportState.RS_UNKNOWN
    assert patterns.report_of(RuntimeError("FORCE STOP")).state is ReportState.RS_NORMAL


def test_the_first_pattern_of_the_table_wins(patterns: Patterns) -> None:
    assert patterns.report_of(RuntimeError("FORCE STOP after UCE ERROR")).state is ReportState.RS_UCE


@pytest.mark.parametrize(
    ("error_time", "state"),
    [(150, ReportState.RS_UCE), (50, ReportState.RS_UCE_CORRUPTED), (None, ReportState.RS_UCE_CORRUPTED)],
)
def test_a_multi_bit_error_is_judged_by_its_time(
    patterns: Patterns, times: UpdateTimes, error_time: int | None, state: ReportState
) -> None:
    times.set_start(100)
    times.set_end(200)
    message = "HBM MULTI BIT ECC" + ("" if error_time is None else f", time us={error_time}.")
    report = patterns.report_of(RuntimeError(message))
    assert (report.state, report.kind) == (state, FaultKind.MEMORY)


def test_the_code_of_the_device_stands_in_the_detail(patterns: Patterns) -> None:
    report = patterns.report_of(RuntimeError("UCE ERROR\nsecond line: Device Error Type 1F."))
    assert report.detail == "RuntimeError: UCE ERROR; Device Error Type 1F"


def test_only_runtime_errors_are_looked_up(patterns: Patterns) -> None:
    report = patterns.report_of(ValueError("UCE ERROR"))
    assert report.state is ReportState.RS_UNKNOWN


def test_what_no_row_knows_is_classified_by_our_rules(patterns: Patterns) -> None:
    report = patterns.report_of(RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1234"))
    assert (report.state, report.kind) == (ReportState.RS_UNKNOWN, FaultKind.COLLATERAL)
    assert patterns.report_of(KeyboardInterrupt()).kind is FaultKind.TERMINATED


def test_a_row_of_ones_own_is_called_with_the_message_and_names_the_fault(patterns: Patterns) -> None:
    heard: list[str] = []

    def handle(message: str) -> str:
        heard.append(message)
        return "LINK DOWN"

    patterns.add("LINK DOWN", "RS_HCCL_FAILED", handle)
    report = patterns.report_of(RuntimeError("port 3: LINK DOWN"))
    assert heard == ["port 3: LINK DOWN"]
    assert (report.state, report.kind) == (ReportState.RS_HCCL_FAILED, FaultKind.NETWORK)


def test_such_a_row_may_give_a_fault_the_name_of_another(patterns: Patterns) -> None:
    patterns.add("DRIVER 7", "RS_UNKNOWN", lambda message: "HCCS LINK ERROR")
    patterns.add("HCCS LINK ERROR", "RS_HCCL_FAILED", lambda message: "HCCS LINK ERROR")
    assert patterns.report_of(RuntimeError("DRIVER 7")).state is ReportState.RS_HCCL_FAILED


def test_a_name_that_nobody_has_introduced_means_what_its_row_was_registered_for(patterns: Patterns) -> None:
    patterns.add("DRIVER 7", "RS_UCE", lambda message: "a name of its own")
    report = patterns.report_of(RuntimeError("DRIVER 7"))
    assert report.state is ReportState.RS_UCE
    assert "a name of its own" in report.detail


def test_a_row_can_be_replaced(patterns: Patterns) -> None:
    patterns.add("UB LINK ERROR", "RS_UNKNOWN", lambda message: "UB LINK ERROR")
    assert patterns.report_of(RuntimeError("UB LINK ERROR")).state is ReportState.RS_UNKNOWN


@pytest.mark.parametrize(
    ("pattern", "state", "handle", "error"),
    [
        ("", "RS_UCE", str, ConfigError),
        (5, "RS_UCE", str, ConfigError),
        ("X", "RS_NO_SUCH", str, ConfigError),
        ("X", "RS_UCE", "not callable", TypeError),
    ],
)
def test_a_row_that_cannot_be_is_refused(
    patterns: Patterns, pattern: object, state: str, handle: object, error: type[Exception]
) -> None:
    with pytest.raises(error, match="tft_register_exception_handler"):
        patterns.add(pattern, state, handle)  # type: ignore[arg-type]


def test_every_state_has_a_kind_or_is_no_fault() -> None:
    assert set(KINDS) == set(ReportState)
