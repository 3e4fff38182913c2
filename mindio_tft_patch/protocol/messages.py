"""Every message of the control channel, as msgspec structs (MessagePack on the wire, never pickle).

Up (processor or agent -> controller): Register, Ready, Heartbeat, FaultReport, Done, Failed, Finished.
Down (controller -> processor or agent): Welcome, Do.

A command is data: new features add phases, strategies and plan fields, not message types. `attempt` is the number of
the recovery; a message of another attempt is stale and is dropped by whoever receives it.
"""

from __future__ import annotations

from enum import Enum
from typing import Union

import msgspec

from mindio_tft_patch.protocol.phases import Activity, FaultKind, Phase, Strategy

PROTOCOL_VERSION = 3


class Role(str, Enum):
    """Who speaks."""

    PROCESSOR = "processor"
    AGENT = "agent"


class CommitState(msgspec.Struct, frozen=True):
    """How far a rank's optimizer state has come (design: the commit gate).

    step: last step whose local update is complete on this rank (0: none).
    at_gate: step that waits at the gate or whose gate raised; its gradients are ready, so the local update can be
        finished on command. None when not at the gate.
    updating: step whose local update was begun and not ended. None outside an update.
    """

    step: int
    at_gate: int | None = None
    updating: int | None = None


class Progress(msgspec.Struct, frozen=True):
    """What a rank's main thread is doing. Ages are seconds before the message was sent."""

    commit: CommitState
    activity: Activity
    activity_seconds: float
    in_collective_seconds: float | None = None  # None: not inside a collective wait
    step_seconds: float | None = None  # median duration of recent steps


class ReplicaSet(msgspec.Struct, frozen=True):
    """Ranks that hold the same optimizer shard. One healthy member suffices to save or repair it.

    name: "dense", "expert", ... ; the shards of different names on one rank are independent.
    ranks: global ranks, ascending.
    """

    name: str
    ranks: tuple[int, ...]


class ShardSource(msgspec.Struct, frozen=True):
    """The healthy rank that speaks for a replica set in this recovery."""

    replica_set: ReplicaSet
    source: int


class Plan(msgspec.Struct, frozen=True):
    """What a recovery is going to do; sent with every phase.

    target_step: step that all state has after the recovery. Of PAUSE: hold when this step is complete; 0: begin no
        further step for now, and answer with the one that was begun last.
    faulty: ranks that are dead, have come back as new processes, or whose state cannot be used: what REPAIR fills.
    lost: ranks whose process is to be started anew by the agent of their node, which ends what is left of the old one.
        Each is named by the first attempt that misses it, in all of its phases, and by no later one.
    participants: ranks that carry the phase out, ascending; from REBUILD on also those that have come back.
    sources: one per replica set; empty until the target is decided.
    reason: the decision, in words.
    """

    strategy: Strategy
    reason: str
    target_step: int = 0
    faulty: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    participants: tuple[int, ...] = ()
    sources: tuple[ShardSource, ...] = ()
    detail: str = ""  # e.g. the path of the checkpoint, in the exit phase


class Register(msgspec.Struct, frozen=True, tag="register"):
    """First message of a peer. An agent registers with rank = -1 and its node's ranks.

    life: random, made anew by every process; in a container that is started again the process ids are the same.
    attempt: the latest that this peer has heard of; a controller that was started again counts on from there.
    """

    role: Role
    rank: int
    world_size: int
    pid: int
    host: str
    node: int = 0
    ranks: tuple[int, ...] = ()
    version: int = PROTOCOL_VERSION
    life: str = ""
    attempt: int = 0


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Model, optimizer and groups exist; from here on the rank can be recovered.

    strategies: what this rank can do beyond exit.
    restarts: lost processes may be started anew; False: a reload fits only as long as none is lost.
    no_checkpoint: why there is none that all could load now; empty: as far as this rank knows there is.
    """

    rank: int
    start_step: int
    replica_sets: tuple[ReplicaSet, ...]
    strategies: tuple[Strategy, ...]
    restarts: bool = True
    no_checkpoint: str = ""


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Sign of life, about once a second."""

    rank: int
    progress: Progress


class FaultReport(msgspec.Struct, frozen=True, tag="fault"):
    """Something happened to `rank`; sent by the rank itself or by the agent of its node.

    step: last completed step; of CORRUPTION the last one on which the holders of the shard agreed.
    pid: process that it happened to, when an agent says so; 0: the current one of the rank.
    """

    rank: int
    kind: FaultKind
    detail: str
    step: int | None = None
    pid: int = 0


class Done(msgspec.Struct, frozen=True, tag="done"):
    """A phase is complete on a rank.

    commit: how far its optimizer state is. Of a PAUSE without target: `step` is the last step that was begun.
    """

    rank: int
    attempt: int
    phase: Phase
    commit: CommitState | None = None
    detail: str = ""
    seconds: float = 0.0
    bytes_moved: int = 0


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A phase could not be carried out on a rank."""

    rank: int
    attempt: int
    phase: Phase
    reason: str
    collateral: bool = False  # only because another rank failed or is gone


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The rank has left training in good order; what happens to it from now on is no fault."""

    rank: int


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Answer to Register.

    returning: this process takes the place of one that was lost while the job goes on; a rank then sets itself up
        without the others and waits for REBUILD. To an agent: the job goes on, its ranks are to be started at once.
    passing: a refusal that may end by itself: another process holds the place and was heard of a moment ago.
    """

    attempt: int
    accepted: bool
    reason: str = ""
    returning: bool = False
    passing: bool = False


class Do(msgspec.Struct, frozen=True, tag="do"):
    """Carry out a phase."""

    attempt: int
    phase: Phase
    plan: Plan


UpMessage = Union[Register, Ready, Heartbeat, FaultReport, Done, Failed, Finished]
DownMessage = Union[Welcome, Do]
