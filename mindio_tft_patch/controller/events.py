"""What goes into the state machine (events) and what comes out (instructions). All frozen, none does anything."""

from __future__ import annotations

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


Event = Union[Received, Tick, Terminate]
Instruction = Union[Send, Log, Conclude]
