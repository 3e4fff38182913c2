"""What an exception means: an ordered table of rules, first match wins.

This is the only place where the text of a message decides anything. Vendor runtimes raise plain RuntimeErrors and
leave no other choice. Users add rules of their own in front of ours with `Detector.add`.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindio_tft_patch.errors import Interrupted
from mindio_tft_patch.protocol.phases import FaultKind


@dataclass(frozen=True)
class Rule:
    """An exception matches when its type and its text do.

    kind: what it means.
    types: qualified names looked for in the exception's class hierarchy; empty matches every type.
    patterns: one of them must occur in the message; empty matches every message.
    why: source of the rule, for the log and for docs.
    """

    kind: FaultKind
    types: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    why: str = ""

    def matches(self, error: BaseException) -> bool:
        """Does this rule speak about `error`?"""
        if self.types and not self.types_of(error) & set(self.types):
            return False
        text = str(error)
        return not self.patterns or any(pattern in text for pattern in self.patterns)

    @staticmethod
    def types_of(error: BaseException) -> set[str]:
        """Qualified names of the classes of an exception. Names, because the core imports no framework."""
        return {f"{cls.__module__}.{cls.__qualname__}" for cls in type(error).__mro__}


DEFAULT_RULES: tuple[Rule, ...] = (
    Rule(FaultKind.TERMINATED, types=("builtins.KeyboardInterrupt",), why="somebody pressed Ctrl-C"),
    # torch_npu: the words stand in every message about these errors, for which it has handlers
    # (csrc/core/npu/NPUException.cpp); the numbers are those of the Ascend runtime, in messages without a handler.
    Rule(
        FaultKind.MEMORY,
        patterns=("UCE ERROR", "HBM MULTI BIT ECC", "error code is 507053", "error code is 507054"),
        why="torch_npu: uncorrectable error in on-chip memory",
    ),
    Rule(
        FaultKind.MEMORY,
        types=("builtins.RuntimeError",),
        patterns=("unsafe data in the input tensor",),
        why="torch_npu: memory that such an error has hit was used before it was renewed",
    ),
    Rule(
        FaultKind.NETWORK,
        patterns=(
            "HCCL OP RETRY FAILED",
            "SUSPECT REMOTE ERROR",
            "UB LINK ERROR",
            "HCCS LINK ERROR",
            "error code is 507056",
            "error code is 507057",
            "error code is 507904",
        ),
        why="torch_npu: link or remote error in a collective",
    ),
    Rule(
        FaultKind.COLLATERAL,
        patterns=("FORCE STOP", "error code is 107022"),
        why="torch_npu: the device was stopped because another rank has a fault",
    ),
    Rule(
        FaultKind.COLLATERAL,
        patterns=("SUSPECT MEM ERROR", "error code is 507055"),
        why="Ascend runtime: memory of another device, which this one reads, has an error; that device reports its own",
    ),
    Rule(
        FaultKind.COLLATERAL,
        types=("builtins.RuntimeError",),
        patterns=("EI0002", "EI0006"),
        why="HCCL: time-out waiting for another rank, or connecting to it; the root cause is elsewhere",
    ),
    Rule(
        FaultKind.COLLATERAL,
        types=("builtins.RuntimeError",),
        patterns=("ERR02200", "HCCL function error"),
        why="torch_npu: a call into HCCL failed; the root cause is elsewhere unless nobody reports one",
    ),
    Rule(
        FaultKind.COLLATERAL,
        types=("torch.distributed.DistNetworkError", "torch.distributed.DistBackendError"),
        why="torch: a collective failed; the root cause is elsewhere unless nobody reports one",
    ),
    Rule(
        FaultKind.COLLATERAL,
        types=("builtins.RuntimeError",),
        patterns=(
            "Connection closed by peer",
            "Connection reset by peer",
            "Connection refused",
            "Broken pipe",
            "gloo/transport",
            "NCCL error",
            "NCCL communicator was aborted",
        ),
        why="gloo and NCCL: the connection to another rank broke",
    ),
)


class Detector:
    """Classifies exceptions by an ordered table of rules."""

    def __init__(self, rules: tuple[Rule, ...] = DEFAULT_RULES) -> None:
        self._rules = list(rules)

    def add(self, rule: Rule) -> None:
        """Put a rule in front of all others."""
        self._rules.insert(0, rule)

    def classify(self, error: BaseException) -> FaultKind:
        """The kind of fault that an exception stands for."""
        if isinstance(error, Interrupted):
            return FaultKind.COLLATERAL
        for rule in self._rules:
            if rule.matches(error):
                return rule.kind
        return FaultKind.EXCEPTION

    def describe(self, error: BaseException) -> str:
        """One line for reports: type and first line of the message, at most 300 characters."""
        text = str(error).strip().splitlines()
        return f"{type(error).__name__}: {text[0] if text else ''}"[:300]
