"""Faults on purpose: a schedule in words, and a listener of the progress board that carries it out.

    TFT_INJECT="rank=1,step=5,moment=forward,kind=sigkill; rank=2,step=5,moment=dump,kind=exception"

For tests and drills; nothing of it runs unless somebody makes a FaultInjector and lets it listen to a ProgressBoard.
The core knows no framework: moments that the board does not have by itself (forward, backward, writes of a save) come
from whoever wraps the framework, through `ProgressBoard.moment`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from mindio_tft_patch.errors import ConfigError

VARIABLE = "TFT_INJECT"

# Moment in a schedule -> name on the board, and whether `step` is the iteration under way (True) or the last one that
# is complete (False).
MOMENTS: dict[str, tuple[str, bool]] = {
    "loader": ("loader", True),  # the data iterator is asked for a micro-batch
    "forward": ("forward", True),
    "backward": ("backward", True),
    "before_gate": ("before_gate", True),
    "barrier": ("barrier", True),  # the gate's barrier has completed, but its caller does not know yet
    "after_gate": ("after_gate", True),  # before the local update
    "in_update": ("in_update", True),  # the local update is half done
    "after_update": ("committed", False),
    "gather": ("gather", False),
    "between": ("step_begin", False),  # after everything of `step`, before the next iteration begins
    "evaluate": ("evaluate_forward", False),
    "save_begin": ("save", False),
    "save": ("save_write", False),  # in the middle of a write, or at the end of the save on a rank that writes nothing
    "save_end": ("save_end", False),
    "dump": ("dump_write", False),  # in the middle of a write of a dying-gasp checkpoint
}


@dataclass(frozen=True)
class PlannedFault:
    """One fault.

    rank: where.
    step: when; see MOMENTS for what it counts. -1: at the first such moment, whatever the step.
    moment: a key of MOMENTS.
    kind: a key of KINDS.
    count: at the n-th such moment of the step.
    delay: seconds to wait first, so that other ranks can get ahead.
    seconds: how long "slow" takes.
    """

    rank: int
    step: int
    moment: str
    kind: str
    count: int = 1
    delay: float = 0.0
    seconds: float = 5.0


def _raise_error(fault: PlannedFault) -> None:
    raise ValueError(f"injected: {fault.moment} of step {fault.step} on rank {fault.rank}")


def _raise_collateral(fault: PlannedFault) -> None:
    raise RuntimeError(f"gloo/transport: Connection closed by peer (injected on rank {fault.rank})")


def _raise_disk_full(fault: PlannedFault) -> None:
    raise OSError(28, f"No space left on device (injected on rank {fault.rank})")


def _send(signum: signal.Signals) -> Callable[[PlannedFault], None]:
    pid = os.getpid()  # a moment may come from a helper process, which must not be mistaken for the rank

    def send(fault: PlannedFault) -> None:
        os.kill(pid, signum)

    return send


def _block(fault: PlannedFault) -> None:
    while True:
        time.sleep(3600.0)


def kinds() -> dict[str, Callable[[PlannedFault], None]]:
    """What can be done to this process, by name."""
    return {
        "sigkill": _send(signal.SIGKILL),
        "sigterm": _send(signal.SIGTERM),
        "sigstop": _send(signal.SIGSTOP),
        "exception": _raise_error,
        "collateral": _raise_collateral,
        "disk_full": _raise_disk_full,
        "exit": lambda fault: os._exit(3),
        "slow": lambda fault: time.sleep(fault.seconds),
        "block": _block,
    }


def read_schedule(text: str) -> tuple[PlannedFault, ...]:
    """Parse a schedule.

    Raises:
        ConfigError: a part that makes no sense.
    """
    types: dict[str, Callable[[str], object]] = {"int": int, "float": float, "str": str}
    known = {field.name: types[str(field.type)] for field in fields(PlannedFault)}
    faults = []
    for part in filter(None, (one.strip() for one in text.split(";"))):
        pairs = [word.strip().partition("=")[::2] for word in part.split(",")]
        try:
            fault = PlannedFault(**{name: known[name](value) for name, value in pairs})  # type: ignore[arg-type]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{VARIABLE}: {part!r} is not a fault ({error}).",
                change="Write rank=, step=, moment= and kind=, separated by commas; faults are separated by ';'.",
            ) from error
        if fault.moment not in MOMENTS or fault.kind not in kinds():
            raise ConfigError(
                f"{VARIABLE}: {part!r} names an unknown moment or kind.",
                change=f"Moments: {', '.join(MOMENTS)}. Kinds: {', '.join(kinds())}.",
            )
        faults.append(fault)
    return tuple(faults)


class FaultInjector:
    """Listener of a ProgressBoard (`board.listen(injector)`); one for each process.

    Args:
        faults: the schedule of the whole job.
        rank: this process.
        act: what each kind does; tests pass their own.
    """

    def __init__(
        self,
        faults: tuple[PlannedFault, ...],
        rank: int,
        act: Mapping[str, Callable[[PlannedFault], None]] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._waiting = {fault: fault.count for fault in faults if fault.rank == rank}
        self._act = kinds() if act is None else act
        self._sleep = sleep

    def __call__(self, moment: str, completed: int) -> None:
        """The board has come to a moment; `completed` is the last complete step."""
        for fault in [one for one in self._waiting if _is_due(one, moment, completed)]:
            self._waiting[fault] -= 1
            if self._waiting[fault] > 0:
                continue
            # A fault that is survived (slow, an exception) must not happen again.
            del self._waiting[fault]
            if fault.delay:
                self._sleep(fault.delay)
            self._act[fault.kind](fault)


def _is_due(fault: PlannedFault, moment: str, completed: int) -> bool:
    name, under_way = MOMENTS[fault.moment]
    return name == moment and fault.step in (-1, completed + under_way)
