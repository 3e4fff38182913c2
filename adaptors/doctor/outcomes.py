"""What each kind of fault will lead to, with these flags on these ranks: a table for the user. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mindio_tft_patch.adaptors.doctor.command import TORCHRUN, TTPRUN
from mindio_tft_patch.adaptors.doctor.layout import Layout
from mindio_tft_patch.protocol.messages import ReplicaSet

SAVED = "checkpoint of the last completed step"
OLDER = "last periodic checkpoint"
NOTHING = "nothing to resume from"


@dataclass(frozen=True)
class Job:
    """What the outcome of a fault depends on.

    Attributes:
        protected: the master switch is on.
        launcher: "ttprun", "torchrun" or "python".
        layout: None when the sizes do not fit together.
        saves: --save is given. periodic: --save-interval is too.
        patience_seconds: what survivors have to write the checkpoint. hang_seconds: least limit of a hang.
        max_restarts: restarts of the whole job by the launcher.
    """

    protected: bool = True
    launcher: str = TTPRUN
    layout: Layout | None = None
    saves: bool = True
    periodic: bool = True
    patience_seconds: float = 120.0
    hang_seconds: float = 60.0
    max_restarts: int = 0

    @property
    def older(self) -> str:
        """What is left where nothing is saved after a fault."""
        return OLDER if self.saves and self.periodic else NOTHING

    @property
    def agent(self) -> bool:
        """Somebody outside of the ranks watches them and runs the controller."""
        return self.launcher == TTPRUN


@dataclass(frozen=True)
class Outcome:
    """One line of the table.

    outcome: what a restart resumes from. why: the reason, in words.
    """

    fault: str
    outcome: str
    why: str

    @property
    def saved(self) -> bool:
        """No completed step is lost."""
        return self.outcome == SAVED


def foresee(job: Job) -> list[Outcome]:
    """The table. Without the master switch every fault ends the same way."""
    if not job.protected:
        why = "--enable-high-availability is off: nobody saves anything after a fault"
        return [Outcome("any fault", job.older, why)]
    if not job.saves or job.layout is None:
        why = "training will not start with these arguments; see the errors"
        return [Outcome("any fault", NOTHING, why)]
    layout = job.layout
    return [
        _process(job, layout),
        _rank_0(job, layout),
        *_nodes(job, layout),
        _all_holders(job, layout),
        _alive(job, layout, "on-chip memory error", "the process lives, and its peers' copy is preferred to its own"),
        _alive(job, layout, "network error between ranks", "no process is lost; saving needs no collective"),
        _hang(job, layout),
        _alive(job, layout, "exception in training", "no process is lost"),
        _sigterm(job),
        Outcome("fault before the first step is complete", job.older, "no step was completed, so nothing is new"),
        Outcome(
            "fault while saving, or disk full",
            job.older,
            "a checkpoint counts only when it is complete; older ones and the tracker stay as they are",
        ),
    ]


def _sole(layout: Layout) -> ReplicaSet | None:
    one = layout.fewest_holders
    return one if len(one.ranks) == 1 else None


def _named(one: ReplicaSet) -> str:
    ranks = ", ".join(map(str, one.ranks[:8])) + (", ..." if len(one.ranks) > 8 else "")
    return f"rank{'s' if len(one.ranks) > 1 else ''} {ranks}"


def _time(job: Job) -> str:
    if job.agent:
        return f"the survivors have {job.patience_seconds:g} s (TTP_OT)"
    if job.launcher == TORCHRUN:
        return (
            "torchrun sends SIGTERM and leaves 30 s, or TTP_OT when its script imports mindio_tft_patch: slower "
            "dumps are lost"
        )
    return "as long as whoever starts the ranks leaves the survivors alone"


def _process(job: Job, layout: Layout) -> Outcome:
    sole = _sole(layout)
    fault = "death of one process"
    if sole is not None:
        return Outcome(fault, job.older, f"{_named(sole)} is the only holder of its {sole.name} optimizer shard")
    return Outcome(fault, SAVED, f"another rank holds the same optimizer shard; {_time(job)}")


def _rank_0(job: Job, layout: Layout) -> Outcome:
    fault = "death of rank 0"
    if not job.agent:
        return Outcome(fault, job.older, f"under {job.launcher} the controller lives in rank 0; ttprun has it outside")
    sole = _sole(layout)
    if sole is not None:
        return Outcome(fault, job.older, "as for any other process")
    return Outcome(fault, SAVED, "the controller lives in ttprun, not in rank 0; as for any other process")


def _nodes(job: Job, layout: Layout) -> Iterator[Outcome]:
    where = "ttprun of that node" if job.agent else "rank 0"
    if layout.nodes == 1:
        yield Outcome("loss of the node", job.older, "there is no other node")
        return
    yield Outcome("loss of the first node", job.older, f"the controller goes with it ({where}), and the job's store")
    fault = "loss of another node"
    for node in range(1, layout.nodes):
        alone = layout.alone_on(node)
        if alone:
            yield Outcome(
                fault,
                job.older,
                f"node {node} alone holds all copies of {len(alone)} shards (such as the {alone[0].name} shard of "
                f"{_named(alone[0])})",
            )
            return
    yield Outcome(fault, SAVED, f"every shard has a copy on another node; {_time(job)}")


def _all_holders(job: Job, layout: Layout) -> Outcome:
    one = layout.fewest_holders
    if len(one.ranks) == 1:
        return Outcome("two processes at once", job.older, "one is enough; see above")
    which = "both holders" if len(one.ranks) == 2 else f"all {len(one.ranks)} holders"
    return Outcome(
        f"{which} of one shard at once",
        job.older,
        f"for example {_named(one)}: no copy of their {one.name} shard is left, so nothing is written",
    )


def _alive(job: Job, layout: Layout, fault: str, why: str) -> Outcome:
    inside = "" if _sole(layout) is None else "; not if it strikes inside the optimizer update, as there is no copy"
    return Outcome(fault, SAVED, f"{why}{inside}; then the job ends (no repair in place in this release)")


def _hang(job: Job, layout: Layout) -> Outcome:
    fault = "a rank that hangs"
    limit = f"found after {job.hang_seconds:g} s or 10 steps without progress (TFT_HANG_SECONDS)"
    if _sole(layout) is not None:
        return Outcome(fault, job.older, f"{limit}; it is the only holder of its shard")
    who = "ttprun kills it" if job.agent else "it is left out"
    return Outcome(fault, SAVED, f"{limit}; {who}, and the others save")


def _sigterm(job: Job) -> Outcome:
    who = "to the launcher, or to any rank" if job.agent else "to any rank"
    return Outcome(f"SIGTERM {who}", SAVED, f"all ranks save, then end; {_time(job)}")
