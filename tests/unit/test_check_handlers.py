"""The contract test of handlers: each kind of lack is named, and handlers that keep the contract pass."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from mindio_tft_patch.errors import Interrupted, RecoveryError
from mindio_tft_patch.processor.handlers import Handlers, Outcome
from mindio_tft_patch.processor.progress import ProgressBoard
from mindio_tft_patch.protocol.messages import CommitState, Plan, ReplicaSet
from mindio_tft_patch.protocol.phases import Phase, Strategy
from mindio_tft_patch.testing import FakeHandlers, Rehearsal, check_handlers

EVERYTHING = (Strategy.RETRY, Strategy.RESPAWN, Strategy.DUMP)


def complaint(handlers: Any, rank: int = 0, rehearsal: Rehearsal | None = None) -> str:
    """What check_handlers says."""
    with pytest.raises(AssertionError) as found:
        check_handlers(handlers, rank=rank, rehearsal=rehearsal)
    return str(found.value)


def test_handlers_that_do_everything_pass() -> None:
    check_handlers(FakeHandlers(offered=EVERYTHING), rank=0)


# ---------------------------------------------------------------- methods


@pytest.mark.parametrize(
    ("name", "point"),
    [
        ("commit_state", 2),
        ("replica_sets", 3),
        ("strategies", 5),
        ("stop", 6),
        ("arrived", 6),
        ("clean", 6),
        ("dump", 7),
        ("rebuild", 9),
        ("repair", 10),
        ("rollback", 11),
        ("resume", 11),
        ("pause", 12),
    ],
)
def test_a_missing_method_is_named_with_its_point(name: str, point: int) -> None:
    handlers = FakeHandlers()
    setattr(handlers, name, None)
    assert f"point {point} ({name}): there is no method {name}(" in complaint(handlers)


def test_every_method_of_the_contract_is_looked_at() -> None:
    methods = {name for name in vars(Handlers) if not name.startswith("_")}
    bare = type("Bare", (), {})()
    assert {line.split("(")[1].split(")")[0] for line in complaint(bare).splitlines()[1:]} == methods


def test_wrong_parameters_are_named() -> None:
    def repair() -> Outcome:
        return Outcome()

    handlers: Any = FakeHandlers()
    handlers.repair = repair
    handlers.stop = lambda reason: None
    said = complaint(handlers)
    assert "point 10 (repair): is called as repair(plan), which it does not take" in said
    assert "point 6 (stop): is called as stop(), which it does not take" in said


def test_a_coroutine_is_named() -> None:
    handlers: Any = FakeHandlers()

    async def dump(plan: Plan) -> Outcome:
        return Outcome()

    handlers.dump = dump
    assert "point 7 (dump): is a coroutine function" in complaint(handlers)


def test_a_generator_function_is_named() -> None:
    handlers: Any = FakeHandlers()

    def dump(plan: Plan) -> Any:
        yield Outcome()

    handlers.dump = dump
    assert "point 7 (dump): is a generator function" in complaint(handlers)


@pytest.mark.parametrize(
    ("method", "answer", "says"),
    [
        ("commit_state", CommitState(step=1.5), "cannot be sent to the controller: Expected `int`, got `float`"),  # type: ignore[arg-type]
        ("commit_state", CommitState(step=True), "cannot be sent to the controller: Expected `int`, got `bool`"),
        ("commit_state", CommitState(step=np.int64(3)), "cannot be sent to the controller"),  # type: ignore[arg-type]
        ("commit_state", CommitState(step=1, updating="2"), "cannot be sent to the controller"),  # type: ignore[arg-type]
        ("replica_sets", (ReplicaSet("dense", None),), "cannot be sent to the controller"),  # type: ignore[arg-type]
        ("replica_sets", (ReplicaSet(None, (0, 1)),), "cannot be sent to the controller"),  # type: ignore[arg-type]
        ("replica_sets", (ReplicaSet("dense", [0, 1]),), "return that"),  # type: ignore[arg-type]
    ],
)
def test_what_the_controller_could_not_read_is_named(method: str, answer: Any, says: str) -> None:
    handlers: Any = FakeHandlers()
    setattr(handlers, method, lambda: answer)
    said = complaint(handlers)
    assert f"({method}): " in said and says in said


def test_an_error_of_a_later_question_is_a_sentence_too() -> None:
    handlers: Any = FakeHandlers()
    answers = iter([CommitState(step=0)])
    handlers.commit_state = lambda: next(answers)
    said = complaint(handlers)
    assert "changes by being asked" in said and "StopIteration" in said


def test_all_lacks_are_told_at_once() -> None:
    handlers: Any = FakeHandlers()
    handlers.repair = handlers.pause = None
    assert len(complaint(handlers).splitlines()) == 3


# ---------------------------------------------------------------- what is offered, and what is implemented


class Raising(FakeHandlers):
    """Not ready yet."""

    def repair(self, plan: Plan) -> Outcome:
        """Fill the state."""
        raise NotImplementedError("later")

    def rollback(self, plan: Plan) -> Outcome:
        raise NotImplementedError


class Empty(FakeHandlers):
    def repair(self, plan: Plan) -> Outcome:
        """Fill the state."""

    def dump(self, plan: Plan) -> Outcome: ...

    def stop(self) -> None:
        pass


class Inheriting(Handlers):
    """Derives from the contract and implements only what it needs."""

    def replica_sets(self) -> tuple[ReplicaSet, ...]:
        return (ReplicaSet("dense", (0, 1)),)

    def strategies(self) -> tuple[Strategy, ...]:
        return (Strategy.DUMP,)

    def commit_state(self) -> CommitState:
        return CommitState(step=0)


def test_a_phase_that_raises_not_implemented_is_named_with_the_strategies_that_need_it() -> None:
    said = complaint(Raising(offered=EVERYTHING))
    assert "point 10 (repair): raises NotImplementedError, but retry, respawn is offered" in said
    assert "point 11 (rollback): raises NotImplementedError" in said
    assert "dump is offered" not in said


def test_a_phase_that_nothing_offered_needs_may_be_missing() -> None:
    check_handlers(Raising(offered=(Strategy.DUMP,)), rank=0)


def test_an_empty_phase_is_named() -> None:
    said = complaint(Empty(offered=EVERYTHING))
    assert "point 10 (repair): is empty, but retry, respawn is offered" in said
    assert "point 7 (dump): is empty, but dump is offered" in said
    assert "point 6 (stop): is empty, but retry, respawn, dump is offered" in said


def test_a_phase_that_is_only_inherited_from_the_contract_is_named() -> None:
    said = complaint(Inheriting())
    assert "point 7 (dump): is only inherited from the contract, where it does nothing, but dump is offered" in said
    assert "point 6 (clean): is only inherited" in said
    assert "point 12 (pause): is only inherited" in said
    assert "(repair)" not in said


@pytest.mark.parametrize(
    ("offered", "said"),
    [
        ((), "point 5 (strategies): nothing is offered"),
        ((Strategy.DUMP, Strategy.EXIT), "point 5 (strategies): exit needs nobody's offer"),
        (["dump"], "point 5 (strategies): must return a tuple of Strategy, not ['dump']"),
        (None, "point 5 (strategies): must return a tuple of Strategy, not None"),
    ],
)
def test_an_offer_that_makes_no_sense_is_named(offered: Any, said: str) -> None:
    assert said in complaint(FakeHandlers(offered=offered))


# ---------------------------------------------------------------- replica sets


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ((), "names no set"),
        ((ReplicaSet("dense", (1, 0)),), "dense: ranks are not ascending, each once: (1, 0)"),
        ((ReplicaSet("dense", (0, 0, 1)),), "dense: ranks are not ascending, each once"),
        ((ReplicaSet("dense", (1, 2)),), "dense: rank 0 is not a member of its own replica set (1, 2)"),
        ((ReplicaSet("dense", (0, 1)), ReplicaSet("dense", (0, 2))), "two sets of this rank have the same name"),
        ([(0, 1)], "must return a tuple of ReplicaSet"),
    ],
)
def test_replica_sets_that_make_no_sense_are_named(sets: Any, said: str) -> None:
    assert f"point 3 (replica_sets): {said}" in complaint(FakeHandlers(sets=sets))


def test_respawn_without_a_second_holder_is_named() -> None:
    alone = (ReplicaSet("dense", (0,)),)
    said = complaint(FakeHandlers(sets=alone, offered=EVERYTHING))
    assert "point 3 (replica_sets): nobody else holds the dense shard of rank 0" in said
    check_handlers(FakeHandlers(sets=alone, offered=(*EVERYTHING, Strategy.RELOAD)), rank=0)


# ---------------------------------------------------------------- commit state


@pytest.mark.parametrize(
    ("commit", "said"),
    [
        (CommitState(step=-1), "step -1 is negative"),
        (CommitState(step=3, at_gate=3), "at_gate is 3, but step 3 is complete already"),
        (CommitState(step=3, updating=2), "updating is 2, but step 3 is complete already"),
        (CommitState(step=3, at_gate=4, updating=4), "a rank is at the gate or behind it, not both at once"),
        (None, "must return a CommitState, not None"),
        (3, "must return a CommitState, not 3"),
    ],
)
def test_a_commit_state_that_makes_no_sense_is_named(commit: Any, said: str) -> None:
    assert f"point 2 (commit_state): {said}" in complaint(FakeHandlers(commit=commit))


def test_a_commit_state_that_changes_by_being_asked_is_named() -> None:
    steps = iter(range(100))
    handlers: Any = FakeHandlers()
    handlers.commit_state = lambda: CommitState(step=next(steps))
    assert "point 2 (commit_state): changes by being asked" in complaint(handlers)


def test_a_commit_state_that_belongs_to_a_thread_is_named() -> None:
    local = threading.local()
    local.step = 3
    handlers: Any = FakeHandlers()
    handlers.commit_state = lambda: CommitState(step=getattr(local, "step", 0))
    assert "does not say the same on another thread" in complaint(handlers)


def test_what_raises_when_it_is_asked_is_named() -> None:
    handlers: Any = FakeHandlers()

    def replica_sets() -> tuple[ReplicaSet, ...]:
        raise KeyError("no groups yet")

    handlers.replica_sets = replica_sets
    assert "point 3 (replica_sets): raised KeyError" in complaint(handlers)


# ---------------------------------------------------------------- rehearsals


@dataclass
class TinyTrainer:
    """Two numbers that training changes, and a partner that holds the same; each method may be broken on purpose."""

    weight: float = 1.0
    reads: int = 0
    partner: tuple[float, int] = (1.0, 0)
    board: ProgressBoard = field(default_factory=ProgressBoard)
    begun: int = 0
    passes_gate: bool = True

    def step(self) -> None:
        """One step."""
        before = self.board.commit.step
        if self.passes_gate:
            self.board.set_commit(CommitState(step=before, at_gate=before + 1))
            self.board.moment("before_gate")
            self.board.set_commit(CommitState(step=before, updating=before + 1))
            self.board.moment("after_gate")
        self.weight, self.reads = self.weight * 2, self.reads + 1
        self.partner = (self.weight, self.reads)
        self.board.set_commit(CommitState(step=before + 1))
        if self.passes_gate:
            self.board.moment("committed")

    def spoil(self) -> None:
        """As a memory error does."""
        self.weight = float("nan")

    def advance(self) -> None:
        """As an interrupted step does."""
        self.reads += 1

    def begin(self) -> None:
        """Another recovery."""
        self.begun += 1

    def hooks(self, **changes: Any) -> Rehearsal:
        """For check_handlers."""
        hooks = Rehearsal(
            state=lambda: {"weight": repr(self.weight), "reads": self.reads},
            spoil=self.spoil,
            advance=self.advance,
            begin=self.begin,
            gather=lambda value: [value, (1, (ReplicaSet("dense", (0, 1)),))],
            step=self.step,
            board=self.board,
            dumps=True,
        )
        return replace(hooks, **changes)


class TinyHandlers(FakeHandlers):
    """Handlers of the tiny trainer, which is the faulty rank 1 or the healthy rank 0."""

    def __init__(self, trainer: TinyTrainer, **broken: Callable[[Plan], Any]) -> None:
        super().__init__(offered=EVERYTHING)
        self.trainer = trainer
        for name, method in broken.items():
            setattr(self, name, method)

    def commit_state(self) -> CommitState:
        return self.trainer.board.commit

    def clean(self, plan: Plan) -> Outcome:
        return self._carry_out(Phase.CLEAN)

    def repair(self, plan: Plan) -> Outcome:
        if plan.faulty:
            self.trainer.weight = self.trainer.partner[0]
        return self._carry_out(Phase.REPAIR)

    def rollback(self, plan: Plan) -> Outcome:
        self.trainer.reads = self.trainer.partner[1]
        return self._carry_out(Phase.ROLLBACK)


def rehearsed(rank: int = 1, changes: dict[str, Any] | None = None, **broken: Any) -> tuple[str, TinyHandlers]:
    """What a rehearsal of these handlers says; empty when it is satisfied."""
    trainer = TinyTrainer()
    handlers = TinyHandlers(trainer, **broken)
    hooks = trainer.hooks(**(changes or {}))
    if rank == 1:
        hooks = replace(hooks, gather=lambda value: [value, (0, (ReplicaSet("dense", (0, 1)),))])
    try:
        check_handlers(handlers, rank=rank, rehearsal=hooks)
    except AssertionError as error:
        return str(error), handlers
    return "", handlers


@pytest.mark.parametrize("rank", [0, 1])
def test_handlers_that_bring_everything_back_pass_their_rehearsal(rank: int) -> None:
    said, handlers = rehearsed(rank)
    assert said == ""
    walk = ["arrived", "clean", "rebuild", "repair", "rollback", "resume"]
    assert [one for one in handlers.called if one != "stop"] == [*walk, *walk, "clean", "dump"]
    assert handlers.called.count("stop") == 2
    assert handlers.trainer.begun == 3


def test_state_that_does_not_come_back_is_named() -> None:
    said, _ = rehearsed(repair=lambda plan: Outcome())
    assert "point 10 (repair): rank 1 has not got back to what it was: weight" in said
    said, _ = rehearsed(rollback=lambda plan: Outcome())
    assert "point 11 (rollback): rank 1 has not got back to what it was: reads" in said


def raising(error: BaseException) -> Callable[[Plan], Outcome]:
    def phase(plan: Plan) -> Outcome:
        if plan:
            raise error
        return Outcome()

    return phase


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (NotImplementedError(), "point 10 (repair): raised NotImplementedError, but retry is offered, which needs it"),
        (RecoveryError("repair", "no source"), "point 10 (repair): raised RecoveryError: repair: no source"),
        (Interrupted(), "point 10 (repair): was ended by the stop of its own recovery"),
    ],
)
def test_a_phase_that_raises_in_a_rehearsal_is_named(error: BaseException, said: str) -> None:
    found, handlers = rehearsed(repair=raising(error))
    assert said in found
    assert "resume" not in handlers.called


def test_a_phase_that_returns_no_outcome_is_named() -> None:
    found, _ = rehearsed(rebuild=lambda plan: None)
    assert "point 9 (rebuild): must return an Outcome, not None" in found


def test_a_stop_that_raises_is_named() -> None:
    def stop() -> None:
        raise OSError("no device")

    found, _ = rehearsed(stop=stop)
    assert "point 6 (stop): raised OSError: no device" in found


def test_a_dump_without_a_path_is_named() -> None:
    found, _ = rehearsed(dump=lambda plan: Outcome())
    assert "point 7 (dump): its Outcome names no path" in found


def test_a_step_that_passes_no_gate_is_named() -> None:
    trainer = TinyTrainer(passes_gate=False)
    said = complaint(TinyHandlers(trainer), 0, trainer.hooks())
    assert "point 2 (commit_state): a step was made and nobody came to the moment before_gate" in said


def test_a_step_that_is_not_reported_is_named() -> None:
    trainer = TinyTrainer()
    said = complaint(TinyHandlers(trainer), 0, trainer.hooks(step=lambda: None, board=None))
    assert "point 2 (commit_state): after one step from 0 it says CommitState(step=0" in said


def test_marks_that_are_made_at_the_wrong_moment_are_named() -> None:
    trainer = TinyTrainer()

    def step() -> None:
        trainer.board.moment("before_gate")
        trainer.step()

    said = complaint(TinyHandlers(trainer), 0, trainer.hooks(step=step))
    assert "at the moment before_gate it says CommitState(step=0, at_gate=None" in said


@pytest.mark.parametrize("name", ["spoil", "advance"])
def test_a_hook_that_changes_nothing_is_named(name: str) -> None:
    found, _ = rehearsed(changes={name: lambda: None})
    assert f"rehearsal: {name}() changes nothing that state() shows" in found


def test_ranks_that_disagree_on_who_holds_what_are_named() -> None:
    trainer = TinyTrainer()
    hooks = trainer.hooks(gather=lambda value: [value, (1, (ReplicaSet("dense", (1, 3)),))])
    said = complaint(TinyHandlers(trainer), 0, hooks)
    assert "point 3 (replica_sets): rank 0 shares its dense shard with ranks (0, 1), but rank 1 says" in said


def test_what_is_only_saved_is_not_rehearsed_in_place() -> None:
    trainer = TinyTrainer()
    handlers = TinyHandlers(trainer)
    handlers.offered = (Strategy.DUMP,)
    check_handlers(handlers, rank=0, rehearsal=trainer.hooks())
    assert handlers.called == ["clean", "dump"]
