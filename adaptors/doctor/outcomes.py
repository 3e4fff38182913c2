"""What each kind of fault will lead to, with these flags on these ranks: a table for the user. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mindio_tft_patch.adaptors.doctor.command import TORCHRUN, TTPRUN
from mindio_tft_patch.adaptors.doctor.layout import Layout
from mindio_tft_patch.config import HBM_FLAG, REBOOT_FLAG
from mindio_tft_patch.protocol.messages import ReplicaSet

REPAIRED = "repaired in place: nothing is lost, no process ends"
ANEW = "process started anew, the others wait: nothing is lost"
RELOADED = "the job stays up, and goes back to the last periodic checkpoint"
SAVED = "checkpoint of the last completed step, then the end"
OLDER = "the end; what is left is the last periodic checkpoint"
NOTHING = "the end; nothing to resume from"

_REFILLED = "its state comes from the rank that holds the same shard"


@dataclass(frozen=True)
class Job:
    """What the outcome of a fault depends on.

    Attributes:
        protected: the master switch is on.
        launcher: "ttprun", "torchrun" or "python".
        layout: None when the sizes do not fit together.
        saves: --save is given. periodic: --save-interval is too.
        patience_seconds: what survivors have to write the checkpoint. hang_seconds: least limit of a hang.
        repairs: --enable-hbmfault-repair is on. reboots: --enable-worker-reboot is.
        reloads: with --distributed-optimizer-no-replica or reboots, a lost state is loaded while the job stays up.
        return_seconds: how long the others wait for a process or a node to come back.
        budget: recoveries in place over the life of the job.
        static: the nodes meet at a fixed address, so that a launcher can be started again.
        placeable: the training data can be read again from a given sample on (not with --dataloader-type external).
    """

    protected: bool = True
    launcher: str = TTPRUN
    layout: Layout | None = None
    saves: bool = True
    periodic: bool = True
    patience_seconds: float = 120.0
    hang_seconds: float = 60.0
    repairs: bool = False
    reboots: bool = False
    reloads: bool = False
    return_seconds: float = 300.0
    budget: int = 100
    static: bool = True
    placeable: bool = True

    @property
    def starts_anew(self) -> bool:
        """Respawn is offered: the flag is on, and the data can be read again from a given sample on."""
        return self.budget > 0 and self.reboots and self.placeable

    @property
    def older(self) -> str:
        """What is left where nothing is saved after a fault."""
        return OLDER if self.saves and self.periodic else NOTHING

    @property
    def agent(self) -> bool:
        """Somebody outside of the ranks watches them and runs the controller; only that can start one anew."""
        return self.launcher == TTPRUN

    @property
    def in_place(self) -> bool:
        """Some fault may be dealt with while the job stays up."""
        return self.mends or self.starts_anew or (self.budget > 0 and self.reloads and self.placeable)

    @property
    def mends(self) -> bool:
        """A fault in a process that lives is repaired."""
        return self.budget > 0 and self.repairs

    @property
    def restarts(self) -> bool:
        """A lost process is started anew."""
        return self.starts_anew and self.agent

    @property
    def goes_back(self) -> bool:
        """All ranks can load the last periodic checkpoint in place; for lost ranks that needs the agent."""
        return self.budget > 0 and (self.reboots or self.reloads) and self.placeable and self.periodic


@dataclass(frozen=True)
class Outcome:
    """One line of the table.

    outcome: what becomes of the job. why: the reason and the conditions, in words.
    """

    fault: str
    outcome: str
    why: str

    @property
    def saved(self) -> bool:
        """No completed step is lost."""
        return self.outcome in (REPAIRED, ANEW, SAVED)


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
        _memory(job, layout),
        _network(job, layout),
        _hang(job, layout),
        Outcome("exception in training", SAVED, f"it would come back, so nothing is repaired{_inside(layout)}"),
        _sigterm(job),
        *_limits(job),
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


def _missing(job: Job, flag: str) -> str:
    """What would have repaired it."""
    if job.budget <= 0:
        return "TFT_RESTART_BUDGET=0 switches recovery in place off"
    if flag == REBOOT_FLAG and not job.placeable:
        return "with --dataloader-type external no process is started anew and no checkpoint is loaded in place"
    if flag == REBOOT_FLAG and job.reboots:
        return f"{REBOOT_FLAG} needs ttprun: {job.launcher} cannot start one rank anew"
    return f"with {flag} the job would stay up"


def _lost(job: Job, fault: str, *, before: str = "") -> Outcome:
    """A process is gone whose shard has another holder. before: how it is noticed, or what is special."""
    if job.restarts:
        return Outcome(fault, ANEW, f"{before}ttprun starts a new process; {_REFILLED}")
    # Reload comes after this: as long as copies of all shards are left, no completed step is given up.
    why = f"{before}another rank holds the same optimizer shard; {_time(job)}; {_missing(job, REBOOT_FLAG)}"
    return Outcome(fault, SAVED, why)


def _uncovered(job: Job, fault: str, why: str) -> Outcome:
    """A process is gone, and with it the last copy of something."""
    if job.goes_back and job.agent:
        return Outcome(fault, RELOADED, f"{why}; ttprun starts the lost ranks anew, and all load it")
    return Outcome(fault, job.older, why)


def _process(job: Job, layout: Layout) -> Outcome:
    sole = _sole(layout)
    fault = "death of one process"
    if sole is not None:
        return _uncovered(job, fault, f"{_named(sole)} is the only holder of its {sole.name} optimizer shard")
    return _lost(job, fault)


def _rank_0(job: Job, layout: Layout) -> Outcome:
    fault = "death of rank 0"
    if not job.agent:
        return Outcome(fault, job.older, f"under {job.launcher} the controller lives in rank 0; ttprun has it outside")
    if _sole(layout) is not None:
        return _uncovered(job, fault, "as for any other process")
    return _lost(job, fault, before="the controller lives in ttprun, not in rank 0, so as for any other process: ")


def _nodes(job: Job, layout: Layout) -> Iterator[Outcome]:
    where = "ttprun of that node" if job.agent else "rank 0"
    if layout.nodes == 1:
        yield Outcome("loss of the node", job.older, "there is no other node")
        return
    yield Outcome("loss of the first node", job.older, f"the controller goes with it ({where}), and the job's store")
    fault = "loss of another node"
    alone = [(node, layout.alone_on(node)) for node in range(1, layout.nodes) if layout.alone_on(node)]
    returns = (
        f"provided that the same command is started again for that node within {job.return_seconds:g} s "
        "(TFT_RETURN_SECONDS)"
    )
    back = job.goes_back and job.agent and job.static
    if alone:
        node, sets = alone[0]
        why = f"node {node} alone holds all copies of {len(sets)} shards (such as the {sets[0].name} shard of "
        why += f"{_named(sets[0])})"
        yield Outcome(fault, RELOADED if back else job.older, f"{why}; {returns}" if back else why)
    elif job.restarts and job.static:
        yield Outcome(fault, ANEW, f"every shard has a copy on another node; {returns}; otherwise {SAVED}")
    else:
        static = "; coming back needs --master-addr and --node-rank" if job.restarts else ""
        yield Outcome(fault, SAVED, f"every shard has a copy on another node; {_time(job)}{static}")


def _all_holders(job: Job, layout: Layout) -> Outcome:
    one = layout.fewest_holders
    if len(one.ranks) == 1:
        return _uncovered(job, "two processes at once", "one is enough; see above")
    which = "both holders" if len(one.ranks) == 2 else f"all {len(one.ranks)} holders"
    why = f"for example {_named(one)}: no copy of their {one.name} shard is left"
    return _uncovered(job, f"{which} of one shard at once", why)


def _inside(layout: Layout) -> str:
    return "" if _sole(layout) is None else "; not if it strikes inside the optimizer update, as there is no copy"


def _memory(job: Job, layout: Layout) -> Outcome:
    fault, alone = "on-chip memory error", _sole(layout) is not None
    if job.mends and not alone:
        return Outcome(fault, REPAIRED, f"{_REFILLED}; the step under way is computed again")
    if job.restarts and not alone:
        return _lost(job, fault, before=f"its memory is not trusted: without {HBM_FLAG} ")
    if job.goes_back and alone:
        return Outcome(fault, RELOADED, "its memory is not trusted; it is the only holder of its shard")
    why = "the process lives, and its peers' copy is preferred to its own"
    return Outcome(fault, SAVED, f"{why}{_inside(layout)}" + ("" if alone else f"; {_missing(job, HBM_FLAG)}"))


def _network(job: Job, layout: Layout) -> Outcome:
    fault = "network error between ranks"
    if job.mends or job.starts_anew:
        return Outcome(fault, REPAIRED, "all process groups are connected anew; the step under way is computed again")
    if job.goes_back and _sole(layout) is not None:
        why = f"without {HBM_FLAG} or {REBOOT_FLAG} connecting anew comes with loading the checkpoint"
        return Outcome(fault, RELOADED, why)
    why = f"no process is lost; saving needs no collective{_inside(layout)}"
    return Outcome(fault, SAVED, f"{why}; {_missing(job, HBM_FLAG)}")


def _hang(job: Job, layout: Layout) -> Outcome:
    fault = "a rank that hangs"
    limit = f"found after {job.hang_seconds:g} s or 10 steps without progress (TFT_HANG_SECONDS)"
    if _sole(layout) is not None:
        return _uncovered(job, fault, f"{limit}; it is the only holder of its shard")
    return _lost(job, fault, before=f"{limit}; {'ttprun kills it' if job.agent else 'it is left out'}; ")


def _sigterm(job: Job) -> Outcome:
    who = "to the launcher, or to any rank" if job.agent else "to any rank"
    return Outcome(f"SIGTERM {who}", SAVED, f"all ranks save, then end; {_time(job)}")


def _limits(job: Job) -> Iterator[Outcome]:
    """What no repair helps against."""
    complete = "a checkpoint counts only when it is complete; older ones and the tracker stay as they are"
    if job.in_place:
        yield Outcome(
            f"recovery number {job.budget + 1} in place",
            SAVED,
            "TFT_RESTART_BUDGET is used up; and before that, a repair that has not helped twice in a row at the same "
            "step gives way to the next strategy",
        )
    if job.restarts:
        yield Outcome("fault during the set-up", job.older, "there is no trained state yet")
        yield Outcome("disk full", job.older, complete)
        return
    yield Outcome("fault before the first step is complete", job.older, "no step was completed, so nothing is new")
    yield Outcome("fault while saving, or disk full", job.older, complete)
