"""Classification of exceptions: the ordered table of rules."""

from __future__ import annotations

import pytest

from mindio_tft_patch.errors import Interrupted
from mindio_tft_patch.processor.detect import Detector, Rule
from mindio_tft_patch.protocol.phases import FaultKind


class DistNetworkError(RuntimeError):
    """Stands for torch's, told apart by its qualified name."""


DistNetworkError.__module__ = "torch.distributed"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("UCE ERROR at 0x1"), FaultKind.MEMORY),
        (RuntimeError("HBM MULTI BIT ECC, time us=1"), FaultKind.MEMORY),
        (RuntimeError("HCCL OP RETRY FAILED"), FaultKind.NETWORK),
        (RuntimeError("SUSPECT REMOTE ERROR"), FaultKind.NETWORK),
        (RuntimeError("HCCS LINK ERROR"), FaultKind.NETWORK),
        (RuntimeError("UB LINK ERROR, error code is 507056"), FaultKind.NETWORK),
        (RuntimeError("NPU function error: aclrtSynchronizeStream, error code is 507053"), FaultKind.MEMORY),
        (RuntimeError("There is unsafe data in the input tensor."), FaultKind.MEMORY),
        (RuntimeError("error code is 507904"), FaultKind.NETWORK),
        (RuntimeError("FORCE STOP"), FaultKind.COLLATERAL),
        (RuntimeError("SUSPECT MEM ERROR, error code is 507055"), FaultKind.COLLATERAL),
        (RuntimeError("OPS function error: HcclAllgather, error code is 6\nEI0006: ..."), FaultKind.COLLATERAL),
        (RuntimeError("EI0002: The wait execution of the Notify register times out"), FaultKind.COLLATERAL),
        (RuntimeError("HCCL function error: x\nERR02200 DIST call hccl api failed."), FaultKind.COLLATERAL),
        (RuntimeError("HCCL function error: x\nHCCL OP RETRY FAILED"), FaultKind.NETWORK),
        (RuntimeError("aicore execution is abnormal, error code is 507015"), FaultKind.EXCEPTION),
        (RuntimeError("[gloo/transport/tcp/pair.cc:5] Connection closed by peer [::1]:1"), FaultKind.COLLATERAL),
        (DistNetworkError("reset"), FaultKind.COLLATERAL),
        (Interrupted(), FaultKind.COLLATERAL),
        (KeyboardInterrupt(), FaultKind.TERMINATED),
        (ValueError("Connection closed by peer"), FaultKind.EXCEPTION),
        (MemoryError(), FaultKind.EXCEPTION),
    ],
)
def test_an_exception_means_what_the_first_matching_rule_says(error: BaseException, kind: FaultKind) -> None:
    assert Detector().classify(error) is kind


def test_a_users_rule_goes_before_ours() -> None:
    detector = Detector()
    detector.add(Rule(FaultKind.NETWORK, types=("builtins.OSError",), patterns=("fabric",)))
    assert detector.classify(OSError("fabric down")) is FaultKind.NETWORK
    assert detector.classify(OSError("disk")) is FaultKind.EXCEPTION


def test_a_description_is_one_short_line() -> None:
    text = Detector().describe(ValueError("first\nsecond" + "x" * 1000))
    assert text == "ValueError: first"
