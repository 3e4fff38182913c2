"""Faults on purpose: a schedule in words, and a listener of the progress board that carries it out.

    TFT_INJECT="rank=1,step=5,moment=forward,kind=sigkill; rank=2,step=5,moment=dump,kind=exception"

For tests and drills; nothing of it runs unless somebody makes a FaultInjector and lets it listen to a ProgressBoard.
The core knows no framework: moments that the board does not have by itself (forward, backward, writes of a save) and
kinds that need tensors come from an adaptor (adaptors/injection).

A fault happens once in a job. Within a process that is easy; but the process may be what the fault ends, and the one
that takes its place reads the same schedule. `FiredFaults` is what both can see; without it a returning process keeps
to the entries that are meant for it (`returned=1`).
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from mindio_tft_patch.errors import ConfigError, TftError
from mindio_tft_patch.fired_faults import FiredFaults

log = logging.getLogger("mindio_tft_patch.injection")

VARIABLE = "TFT_INJECT"
STATE_VARIABLE = "TFT_INJECT_STATE"  # folder of FiredFaults

# Moment in a schedule -> name on the board, and whether `step` is the iteration under way (True) or the last one that
# is complete (False).
MOMENTS: dict[str, tuple[str, bool]] = {
    "setup": ("setup", False),  # the model is about to be built; no step is known yet: step=-1
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
    # A recovery: the main thread is about to carry the phase out.
    "stop": ("phase_stop", False),
    "clean": ("phase_clean", False),
    "rebuild": ("phase_rebuild", False),
    "repair": ("phase_repair", False),
    "rollback": ("phase_rollback", False),
    "resume": ("phase_resume", False),
}

# Kinds that an adaptor carries out, because they reach into tensors or connections.
ADAPTOR_KINDS = (
    "memory_parameters",
    "memory_main_parameters",
    "memory_moments",
    "memory_gradients",
    "memory_activations",
    "memory_ecc",
    "bit_flip",
    "broken_sockets",
)


@dataclass(frozen=True)
class PlannedFault:
    """One fault.

    rank: where.
    step: when; see MOMENTS for what it counts. -1: at the first such moment, whatever the step.
    moment: a key of MOMENTS.
    kind: a key of kinds(), or one of ADAPTOR_KINDS.
    count: at the n-th such moment of the step.
    delay: seconds to wait first, so that other ranks can get ahead.
    seconds: how long "slow" takes.
    times: how often it happens in the job, each time at a moment that fits.
    returned: 1: only in a process that takes the place of a lost one.
    """

    rank: int
    step: int
    moment: str
    kind: str
    count: int = 1
    delay: float = 0.0
    seconds: float = 5.0
    times: int = 1
    returned: int = 0

    def words(self) -> str:
        """The entry as a schedule has it; what is as by default is left out."""
        told = [f"{field.name}={getattr(self, field.name)}" for field in fields(self) if self._tells(field.name)]
        return ",".join(told)

    def _tells(self, name: str) -> bool:
        return name in ("rank", "step", "moment", "kind") or getattr(self, name) != getattr(type(self), name)


Act = Callable[[PlannedFault], None]


class NotInjectedError(TftError):
    """A kind cannot be done at this moment, and nothing was done."""


def _raise_error(fault: PlannedFault) -> None:
    raise ValueError(f"injected: {fault.moment} of step {fault.step} on rank {fault.rank}")


def _raise_collateral(fault: PlannedFault) -> None:
    raise RuntimeError(f"gloo/transport: Connection closed by peer (injected on rank {fault.rank})")


def _raise_disk_full(fault: PlannedFault) -> None:
    raise OSError(28, f"No space left on device (injected on rank {fault.rank})")


def _send(signum: signal.Signals) -> Act:
    pid = os.getpid()  # a moment may come from a helper process, which must not be mistaken for the rank

    def send(fault: PlannedFault) -> None:
        os.kill(pid, signum)

    return send


def _block(fault: PlannedFault) -> None:
    while True:
        time.sleep(3600.0)


def kinds() -> dict[str, Act]:
    """What can be done to this process without knowing a framework, by name."""
    return {
        "sigkill": _send(signal.SIGKILL),
        "sigterm": _send(signal.SIGTERM),
        "sigstop": _send(signal.SIGSTOP),
        "sigsegv": _send(signal.SIGSEGV),
        "exception": _raise_error,
        "collateral": _raise_collateral,
        "disk_full": _raise_disk_full,
        "exit": lambda fault: os._exit(3),
        "slow": lambda fault: time.sleep(fault.seconds),
        "block": _block,
    }


def known_kinds() -> tuple[str, ...]:
    """Every kind that a schedule may name."""
    return (*kinds(), *ADAPTOR_KINDS)


def read_schedule(text: str, source: str = VARIABLE) -> tuple[PlannedFault, ...]:
    """Parse a schedule.

    Args:
        source: variable or option that the schedule comes from, for messages.

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
                f"{source}: {part!r} is not a fault ({error}).",
                change="Write rank=, step=, moment= and kind=, separated by commas; faults are separated by ';'.",
            ) from error
        if fault.moment not in MOMENTS or fault.kind not in known_kinds():
            raise ConfigError(
                f"{source}: {part!r} names an unknown moment or kind.",
                change=f"Moments: {', '.join(MOMENTS)}. Kinds: {', '.join(known_kinds())}.",
            )
        faults.append(fault)
    return tuple(faults)


@dataclass
class _Entry:
    """A fault of this rank. number: its place in the schedule. waiting: moments that have to pass."""

    number: int
    fault: PlannedFault
    waiting: int
    fired: int = 0


class FaultInjector:
    """Listener of a ProgressBoard (`board.listen(injector)`); one for each process.

    Args:
        faults: the schedule of the whole job.
        rank: this process.
        act: what each kind does; kinds that it lacks are refused.
        replaces: has this process taken the place of a lost one? Asked at every moment, because it is known late; it
            stays so after the recovery.
        fired: what has happened in this job already; None: nobody remembers.

    Raises:
        ConfigError: the schedule wants a kind of this rank that nobody here can do.
    """

    def __init__(
        self,
        faults: tuple[PlannedFault, ...],
        rank: int,
        act: Mapping[str, Act] | None = None,
        sleep: Callable[[float], None] = time.sleep,
        *,
        replaces: Callable[[], bool] = lambda: False,
        fired: FiredFaults | None = None,
    ) -> None:
        self._act = kinds() if act is None else act
        self._sleep = sleep
        self._replaces = replaces
        self._fired = fired
        self._entries = [
            _Entry(number, fault, fault.count) for number, fault in enumerate(faults) if fault.rank == rank
        ]
        lacking = sorted({entry.fault.kind for entry in self._entries} - set(self._act))
        if lacking:
            raise ConfigError(
                f"{VARIABLE}: nobody in this process can do {', '.join(lacking)}.",
                change="These kinds need the Megatron adaptor, and a job with the plugin's master flag.",
            )

    def __call__(self, moment: str, completed: int) -> None:
        """The board has come to a moment; `completed` is the last complete step."""
        for entry in [one for one in self._entries if _is_due(one.fault, moment, completed)]:
            if not self._is_meant(entry.fault):
                continue
            entry.waiting -= 1
            if entry.waiting > 0:
                continue
            entry.waiting, entry.fired = entry.fault.count, entry.fired + 1
            # A fault that is survived (slow, an exception) must not happen again.
            if entry.fired >= entry.fault.times:
                self._entries.remove(entry)
            if self._claimed(entry, completed):
                self._do(entry, completed)

    def _is_meant(self, fault: PlannedFault) -> bool:
        if not self._replaces():
            return not fault.returned
        return bool(fault.returned) or self._fired is not None

    def _claimed(self, entry: _Entry, completed: int) -> bool:
        fault = entry.fault
        return self._fired is None or self._fired.claim(entry.number, fault.words(), completed, fault.times)

    def _do(self, entry: _Entry, completed: int) -> None:
        fault = entry.fault
        found = {"injected": entry.number, "completed": completed}
        log.warning("injecting a fault on purpose: %s", fault.words(), extra={"fields": found})
        if fault.delay:
            self._sleep(fault.delay)
        try:
            self._act[fault.kind](fault)
        except NotInjectedError as refusal:
            log.error("the fault was not injected: %s: %s", fault.words(), refusal, extra={"fields": found})
            if self._fired is not None:
                self._fired.withdraw(entry.number)


def _is_due(fault: PlannedFault, moment: str, completed: int) -> bool:
    name, under_way = MOMENTS[fault.moment]
    return name == moment and fault.step in (-1, completed + under_way)
