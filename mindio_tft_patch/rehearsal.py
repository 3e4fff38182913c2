"""Recoveries rehearsed in a trainer that has no fault: everything must be afterwards as it was.

Behind `mindio_tft_patch.testing.check_handlers`; contract.py is the other half.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mindio_tft_patch.contract import says
from mindio_tft_patch.errors import Interrupted
from mindio_tft_patch.processor.handlers import Handlers, Outcome
from mindio_tft_patch.processor.progress import ProgressBoard
from mindio_tft_patch.protocol.messages import CommitState, Plan, ReplicaSet, ShardSource
from mindio_tft_patch.protocol.phases import PATHS, Phase, Strategy

_REFILLING = (Strategy.RETRY, Strategy.RESPAWN)


@dataclass(frozen=True)
class Rehearsal:
    """What recoveries without a fault need of a trainer. All ranks rehearse together, between the same two steps.

    Attributes:
        state: everything that training changes on this rank, by name, as values that == compares (digests, say).
        spoil: overwrites what a memory error may hit: parameters, optimizer state, scalars of the parameter groups.
        advance: does what an interrupted step does beside that: draws random numbers, reads data, counts.
        begin: called before each recovery; what it builds needs names of its own (porting.Protection.rehearse).
        gather: what every rank passes, in the order of ranks; the default is for one process.
        step: makes one training step. None: not tried.
        board: of this rank, where the gate makes its marks; for `step`.
        dumps: rehearse the dump as well, which writes a checkpoint of the present step.
    """

    state: Callable[[], Mapping[str, object]]
    spoil: Callable[[], None]
    advance: Callable[[], None]
    begin: Callable[[], None] = lambda: None
    gather: Callable[[Any], Sequence[Any]] = lambda value: [value]
    step: Callable[[], None] | None = None
    board: ProgressBoard | None = None
    dumps: bool = False


@dataclass
class _Stage:
    """A rehearsal that is going on. sets: replica sets of all ranks."""

    handlers: Handlers
    rank: int
    hooks: Rehearsal
    sets: tuple[ReplicaSet, ...] = ()
    ranks: tuple[int, ...] = ()
    found: list[str] = field(default_factory=list)

    @property
    def step(self) -> int:
        """Last completed step of this rank."""
        commit = self.handlers.commit_state()
        return 0 if commit is None else commit.step

    def plan(self, strategy: Strategy, faulty: tuple[int, ...]) -> Plan:
        sources = tuple(
            ShardSource(one, next((rank for rank in one.ranks if rank not in faulty), one.ranks[0]))
            for one in self.sets
        )
        return Plan(
            strategy, "rehearsal", target_step=self.step, faulty=faulty, participants=self.ranks, sources=sources
        )


def rehearse(handlers: Handlers, rank: int, hooks: Rehearsal) -> list[str]:
    """Carry out what is offered, without a fault.

    Returns:
        What went wrong on this rank, each in a sentence. The first thing that goes wrong ends the rehearsal.
    """
    stage = _Stage(handlers, rank, hooks)
    for scene in (_meet, _step, _roll_back, _refill, _dump):
        scene(stage)
        if stage.found:
            break
    return stage.found


def _meet(stage: _Stage) -> None:
    """All ranks must agree on who holds what."""
    everyone: list[tuple[int, tuple[ReplicaSet, ...]]] = list(
        stage.hooks.gather((stage.rank, stage.handlers.replica_sets()))
    )
    named = dict(everyone)
    stage.ranks = tuple(sorted(named))
    stage.sets = tuple(sorted({one for sets in named.values() for one in sets}, key=msgspec.structs.astuple))
    for one in stage.handlers.replica_sets():
        for partner in one.ranks:
            if one not in named.get(partner, ()):
                others = [other for other in named.get(partner, ()) if other.name == one.name]
                stage.found.append(
                    says(
                        "replica_sets",
                        f"rank {stage.rank} shares its {one.name} shard with ranks {one.ranks}, but rank {partner} "
                        f"says {others or 'nothing of it'}",
                    )
                )


def _step(stage: _Stage) -> None:
    """One step passes the gate, and marks are made around it."""
    hooks, handlers = stage.hooks, stage.handlers
    if hooks.step is None:
        return
    before, seen = stage.step, dict[str, CommitState | None]()

    def note(moment: str, step: int) -> None:
        seen.setdefault(moment, handlers.commit_state())

    if hooks.board is not None:
        hooks.board.listen(note)
    hooks.step()
    after = handlers.commit_state()
    if after != CommitState(step=before + 1):
        stage.found.append(says("commit_state", f"after one step from {before} it says {after}"))
    expected = {
        "before_gate": CommitState(step=before, at_gate=before + 1),
        "after_gate": CommitState(step=before, updating=before + 1),
        "committed": CommitState(step=before + 1),
    }
    for moment, commit in expected.items() if hooks.board is not None else ():
        if moment not in seen:
            stage.found.append(says("commit_state", f"a step was made and nobody came to the moment {moment}"))
        elif seen[moment] != commit:
            stage.found.append(says("commit_state", f"at the moment {moment} it says {seen[moment]}, not {commit}"))


def _roll_back(stage: _Stage) -> None:
    """Nothing is lost; a step was begun and not ended."""
    strategy = _first_of(stage, _REFILLING)
    if strategy is not None:
        changed = _changed_by(stage, stage.hooks.advance, "advance")
        _recover(stage, stage.plan(strategy, ()), changed, "rollback")


def _refill(stage: _Stage) -> None:
    """The state of one rank is lost."""
    strategy = _first_of(stage, _REFILLING)
    shared = [rank for rank in stage.ranks if all(len(one.ranks) > 1 for one in stage.sets if rank in one.ranks)]
    if strategy is None or not shared:
        return
    faulty = shared[-1]
    before = stage.hooks.state()
    if stage.rank == faulty:
        before = _changed_by(stage, stage.hooks.spoil, "spoil")
    _recover(stage, stage.plan(strategy, (faulty,)), before, "repair")


def _dump(stage: _Stage) -> None:
    if stage.hooks.dumps and Strategy.DUMP in stage.handlers.strategies():
        before = stage.hooks.state()
        stage.hooks.begin()
        plan = stage.plan(Strategy.DUMP, ())
        details = [_carry_out(stage, phase, plan) for phase in (Phase.CLEAN, Phase.DUMP)]
        if not stage.found and not details[-1]:
            stage.found.append(says("dump", "its Outcome names no path (detail) of a checkpoint"))
        _compare(stage, before, "dump")


def _first_of(stage: _Stage, wanted: Sequence[Strategy]) -> Strategy | None:
    offered = stage.handlers.strategies()
    return next((one for one in wanted if one in offered), None)


def _changed_by(stage: _Stage, change: Callable[[], None], name: str) -> Mapping[str, object]:
    """The state before a hook of the rehearsal changes it."""
    before = stage.hooks.state()
    change()
    if stage.hooks.state() == before:
        stage.found.append(f"rehearsal: {name}() changes nothing that state() shows, so that nothing would be tested")
    return before


def _recover(stage: _Stage, plan: Plan, before: Mapping[str, object], blamed: str) -> None:
    """Walk the path of an in-place strategy; the state must be `before` in the end."""
    if stage.found:
        return
    stage.hooks.begin()
    _stop(stage)
    for phase in PATHS[plan.strategy][1:]:
        if stage.found:
            return
        _carry_out(stage, phase, plan)
    _compare(stage, before, blamed)


def _stop(stage: _Stage) -> None:
    failed: list[BaseException] = []

    def stop() -> None:
        try:
            stage.handlers.stop()
        except BaseException as error:
            failed.append(error)

    # As the control thread does.
    thread = threading.Thread(target=stop)
    thread.start()
    thread.join()
    for error in failed:
        stage.found.append(says("stop", f"raised {type(error).__name__}: {error}"))
    stage.handlers.arrived()


def _carry_out(stage: _Stage, phase: Phase, plan: Plan) -> str:
    """Run a phase; the detail of its outcome."""
    if stage.found:
        return ""
    try:
        outcome: Any = getattr(stage.handlers, phase.value)(plan)
    except Interrupted:
        words = (
            "was ended by the stop of its own recovery: inside a phase only a later stop may end a wait "
            "(adaptors.porting.Protection runs handlers so; check those: protection.handlers). When another rank has "
            "failed before, this is a consequence of it: its error is the one to read"
        )
        stage.found.append(says(phase.value, words))
        return ""
    except NotImplementedError:
        words = f"raised NotImplementedError, but {plan.strategy.value} is offered, which needs it"
        stage.found.append(says(phase.value, words))
        return ""
    except BaseException as error:
        stage.found.append(says(phase.value, f"raised {type(error).__name__}: {error}"))
        return ""
    if not isinstance(outcome, Outcome):
        stage.found.append(says(phase.value, f"must return an Outcome, not {outcome!r}"))
        return ""
    return outcome.detail


def _compare(stage: _Stage, before: Mapping[str, object], blamed: str) -> None:
    after = stage.hooks.state()
    different = sorted(name for name in {**before, **after} if before.get(name) != after.get(name))
    if different and not stage.found:
        listed = ", ".join(different[:8]) + (" and more" if len(different) > 8 else "")
        stage.found.append(says(blamed, f"rank {stage.rank} has not got back to what it was: {listed}"))
    commit = stage.handlers.commit_state()
    if not stage.found and commit != CommitState(step=stage.step):
        stage.found.append(says("commit_state", f"after a recovery it says {commit}"))
