"""What goes into the state machine (events) and what comes out (instructions). All frozen, none does anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Union

from mindio_tft_patch.protocol.messages import DownMessage, Role, UpMessage
from mindio_tft_patch.protocol.phases import Strategy


@dataclass(frozen=True)
class Peer:
    """Who a message comes from or goes to: the processor of a rank, or the agent of a node."""

    role: Role
    index: int


def processor(rank: int) -> Peer:
    """The processor of a rank."""
    return Peer(Role.PROCESSOR, rank)


def agent(node: int) -> Peer:
    """The agent of a node."""
    return Peer(Role.AGENT, node)


@dataclass(frozen=True)
class Received:
    """A message of a peer that has registered, or its Register."""

    peer: Peer
    message: UpMessage


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class Terminate:
    """Somebody asked the whole job to end."""

    detail: str


# What the cluster manager says, when there is one. Ranks come with their type of fault (controller.vocabulary).


@dataclass(frozen=True)
class Attached:
    """A cluster manager takes part from now on."""


@dataclass(frozen=True)
class StopTraining:
    """Stop all ranks, these are faulty."""

    ranks: Mapping[int, int]


@dataclass(frozen=True)
class PauseTraining:
    """Let all ranks hold between two steps.

    timeout_seconds: how long they hold when nothing more is said; None: as long as the manager is waited for elsewhere.
    """

    timeout_seconds: float | None


@dataclass(frozen=True)
class FaultyRanks:
    """All ranks that are faulty, in the view of the whole cluster.

    seconds: how long the manager may take for its choice, where that is longer than usual.
    """

    ranks: Mapping[int, int]
    seconds: float


@dataclass(frozen=True)
class Choose:
    """Carry out this strategy, in the manager's word for it."""

    word: str


@dataclass(frozen=True)
class SaveAndExit:
    """Write a checkpoint and end the job."""


@dataclass(frozen=True)
class Unheard:
    """A report could not be delivered to the manager: it is not to be waited for."""

    detail: str


@dataclass(frozen=True)
class Send:
    """Send a message to a peer."""

    peer: Peer
    message: DownMessage


@dataclass(frozen=True)
class Log:
    """Write a line to the log; `level` is the name of a level of the logging module."""

    level: str
    text: str
    fields: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """How the job ends.

    Attributes:
        strategy: DUMP when a dying-gasp checkpoint was written, else EXIT.
        reason: the decision, in words.
        checkpoint: path of the checkpoint that was written; empty when none was.
        step: step of that checkpoint; 0 when none was written.
        record: the recovery record (see controller.record).
    """

    strategy: Strategy
    reason: str
    checkpoint: str
    step: int
    record: dict[str, object]


@dataclass(frozen=True)
class Conclude:
    """The job ends; nothing but EXIT is sent from now on."""

    verdict: Verdict


@dataclass(frozen=True)
class Answer:
    """Whether the order of the cluster manager, which was the event, is obeyed; `reason` says why it is not."""

    obeyed: bool
    reason: str = ""


# What the cluster manager is told.


@dataclass(frozen=True)
class ReportFaults:
    """These ranks are faulty."""

    ranks: Mapping[int, int]


@dataclass(frozen=True)
class ReportStopped:
    """All ranks have stopped, or hold; or not, see controller.vocabulary.Code."""

    code: int
    text: str
    ranks: Mapping[int, int]


@dataclass(frozen=True)
class ReportStrategies:
    """These strategies fit."""

    ranks: Mapping[int, int]
    words: tuple[str, ...]


@dataclass(frozen=True)
class ReportResult:
    """A strategy was carried out, or has failed."""

    code: int
    text: str
    ranks: Mapping[int, int]
    word: str


Report = Union[ReportFaults, ReportStopped, ReportStrategies, ReportResult]


@dataclass(frozen=True)
class Tell:
    """Tell the cluster manager."""

    report: Report


Order = Union[Attached, StopTraining, PauseTraining, FaultyRanks, Choose, SaveAndExit, Unheard]
Event = Union[Received, Tick, Terminate, Order]
Instruction = Union[Send, Log, Conclude, Answer, Tell]
