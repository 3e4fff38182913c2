"""The last lines of `ttprun`: what died, why the job ended, where the checkpoint is."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mindio_tft_patch.protocol.messages import Do
from mindio_tft_patch.protocol.phases import LADDER, Strategy


def signal_name(signum: int) -> str:
    """SIGKILL for 9; "signal 77" for one that this system has no name for."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def describe_exit(code: int) -> str:
    """How a process ended. code: exit code, negative for the number of a signal."""
    return f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"


@dataclass(frozen=True)
class Death:
    """A local rank that ended badly before it was told to. seconds: monotonic time at which it was noticed."""

    rank: int
    pid: int
    code: int
    seconds: float


@dataclass(frozen=True)
class Ending:
    """How an attempt ended on this node.

    deaths: ranks that ended badly by themselves and were not replaced, in the order noticed.
    ended_by_launcher: ranks that had to be ended.
    verdict: the controller's EXIT command; None when it never came.
    signal: the first signal that the launcher was sent; None: none.
    restarts_left: restarts of the whole job that torchelastic still grants; 0: the job is over.
    recoveries: recoveries in place before this end, by strategy.
    """

    node: int
    deaths: tuple[Death, ...]
    ended_by_launcher: tuple[int, ...] = ()
    verdict: Do | None = None
    controller_lost: str = ""
    out_of_time: bool = False
    patience_seconds: float = 0.0
    signal: int | None = None
    restarts_left: int = 0
    recoveries: Mapping[Strategy, int] = field(default_factory=dict)


def _reason(ending: Ending) -> str:
    if ending.verdict is not None:
        return ending.verdict.plan.reason
    if ending.controller_lost:
        return ending.controller_lost
    if ending.out_of_time:
        return (
            f"no checkpoint was finished within {ending.patience_seconds:g} s of the fault (TTP_OT); "
            "raise TTP_OT if writing takes longer"
        )
    return "the controller gave no reason before every rank had ended"


def _checkpoint(ending: Ending) -> str:
    verdict = ending.verdict
    if verdict is not None and verdict.plan.strategy is Strategy.DUMP and verdict.plan.detail:
        return f"checkpoint: step {verdict.plan.target_step} in {verdict.plan.detail}"
    return "checkpoint: none was written now; older checkpoints are as they were"


def final_lines(ending: Ending) -> list[str]:
    """The report, a line each, without a prefix."""
    if ending.signal is not None:
        lines = [f"the job ended because the launcher received {signal_name(ending.signal)}"]
    else:
        lines = ["the job ended after a fault" if not ending.restarts_left else "the attempt ended after a fault"]
    for death in ending.deaths:
        lines.append(f"rank {death.rank} (node {ending.node}, pid {death.pid}) {describe_exit(death.code)}")
    if ending.ended_by_launcher:
        ranks = ", ".join(map(str, ending.ended_by_launcher))
        lines.append(f"rank(s) {ranks} did not end by themselves and were ended by the launcher")
    lines += recovery_lines(ending.recoveries)
    lines.append(f"reason: {_reason(ending)}")
    lines.append(_checkpoint(ending))
    if ending.restarts_left:
        lines.append(f"starting all ranks again; {_restarts(ending.restarts_left - 1)} after this one")
    return lines


def recovery_lines(recoveries: Mapping[Strategy, int]) -> list[str]:
    """How often the job was repaired in place; no line when it never was."""
    counts = [f"{strategy.value} {recoveries[strategy]}" for strategy in LADDER if recoveries.get(strategy)]
    return [f"recoveries in place: {sum(recoveries.values())} ({', '.join(counts)})"] if counts else []


def early_lines(rank: int, code: int, told: str, otherwise: Sequence[str]) -> list[str]:
    """The report of a job that ended before any rank had registered.

    Args:
        told: what the rank wrote into its error file. otherwise: what to say when that is nothing.
    """
    lines = [f"the job ended before training: rank {rank} {describe_exit(code)}"]
    # torch fills in a text of its own for ranks that wrote nothing.
    if told and "traceback" not in told.lower() and not told.startswith("Signal"):
        return [*lines, *told.splitlines()]
    return [*lines, *otherwise]


def _restarts(count: int) -> str:
    return f"{count} restart is left" if count == 1 else f"{count} restarts are left"


def formatted(lines: Sequence[str]) -> str:
    """The lines as they are printed."""
    return "".join(f"ttprun: {line}\n" for line in lines)
