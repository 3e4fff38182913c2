"""A drill made by hand: firings, records and lines as the product writes them. For tests without a job."""

from __future__ import annotations

from typing import Any

from mindio_tft_patch.fault_injection import read_schedule
from mindio_tft_patch.fired_faults import Firing
from mindio_tft_patch.launch.drill.findings import Line, Report, Run, outcomes_of, recoveries_of

# As Megatron and the controller have written them.
ITERATION = (
    " [2026-11-29 21:45:47.123456] iteration        5/      20 | consumed samples:           80 | elapsed time per "
    "iteration (ms): 41.3 | learning rate: 1.0E-03 | global batch size:    16 | lm loss: 5.412345E+00 | loss scale: "
    "1.0 | grad norm: 1.204 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)
RECORD: dict[str, Any] = {
    "time": 1000.0,
    "level": "INFO",
    "logger": "mindio_tft_patch.controller",
    "rank": None,
    "role": "launcher",
    "attempt": 1,
    "phase": "resume",
    "message": "...",
    "record": "recovery",
    "fault": [{"rank": 1, "kind": "process_death", "detail": "was killed by SIGKILL"}],
    "ranks": [1],
    "participants": [0, 1, 2, 3],
    "step": 4,
    "recomputed_steps": 0,
    "seconds": {"stop": 0.045, "clean": 0.002, "rebuild": 0.2, "repair": 0.1, "rollback": 0.01, "resume": 0.01},
    "seconds_in_all": 0.657,
    "bytes_moved": 3153475,
    "strategy": "respawn",
    "attempts": 1,
    "checkpoint": "",
    "reason": "respawn after rank 1: process_death (was killed by SIGKILL); step 4 is the last completed one",
}
FAULT = "rank=1,step=5,moment=forward,kind=sigkill"


def record(**changes: Any) -> dict[str, Any]:
    return {**RECORD, **changes}


def dump(**changes: Any) -> dict[str, Any]:
    return record(strategy="dump", seconds={"stop": 0.1, "dump": 0.3}, checkpoint="/c/iter_0000004", **changes)


def fired(number: int, time: float, completed: int = 4) -> Firing:
    return Firing(number, "", completed, time, 1)


def lines(*steps: int, began: float = 990.0, text: str = "loss") -> tuple[Line, ...]:
    return tuple(Line(step, f"{text} {step}", began + step) for step in steps)


def run(*log: dict[str, Any], code: int = 0, seen: tuple[Line, ...] = ()) -> Run:
    return Run(900.0, 1100.0, code, seen, tuple(log))


def report(schedule: str, firings: list[Firing], *runs: Run, **more: Any) -> Report:
    faults = read_schedule(schedule)
    recoveries = [recovery for one in runs for recovery in recoveries_of(one.log)]
    outcomes = tuple(outcomes_of(faults, firings, runs, recoveries))
    return Report("ttprun ...", schedule, 4, runs, outcomes, tuple(recoveries), **more)
