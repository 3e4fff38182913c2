"""Whatever happens in whatever order: a recovery ends, and a completed step is never planned away.

Nor is anybody refilled from a rank that is suspect or has itself just come back, and no attempt has two targets.
"""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.control import Job, register

from mindio_tft_patch.controller.events import Instruction, Send
from mindio_tft_patch.protocol.messages import CommitState, Do, Done, Failed
from mindio_tft_patch.protocol.phases import Activity, FaultKind, Phase, Strategy

RANK = st.integers(0, 3)
OFFERS = st.sampled_from([(Strategy.DUMP,), (Strategy.RETRY, Strategy.DUMP), tuple(Strategy), ()])
EVENT = st.one_of(
    st.tuples(st.just("dies"), RANK),
    st.tuples(st.just("reports"), RANK, st.sampled_from(FaultKind)),
    st.tuples(st.just("answers"), RANK, st.booleans(), st.booleans()),
    st.tuples(st.just("fails"), RANK),
    st.tuples(st.just("finishes"), RANK),
    st.tuples(st.just("beats"), RANK, st.sampled_from(Activity), st.sampled_from([None, 50.0])),
    st.tuples(st.just("passes"), st.sampled_from([0.1, 0.5, 3.0, 20.0])),
    st.tuples(st.just("terminates")),
    st.tuples(st.just("registers"), RANK),
    st.tuples(st.just("ready"), RANK),
    st.tuples(st.just("launches"), st.integers(0, 1)),
    st.tuples(st.just("dark"), st.integers(0, 1)),
    st.tuples(st.just("all answer"), st.booleans()),
)


def _commit(passed: bool, at_gate: bool) -> CommitState:
    return CommitState(6) if passed else CommitState(5, at_gate=6 if at_gate else None)


def _phase(job: Job) -> Phase | None:
    recovery = job.machine._walker.recovery
    return recovery.walk.phase if recovery and recovery.walk else None


def _play(job: Job, event: tuple[object, ...], commits: dict[int, CommitState]) -> None:
    kind, *more = event
    rank = more[0] if more and isinstance(more[0], int) else 0
    phase = _phase(job)
    if kind == "dies":
        job.dies(rank)
    elif kind == "reports":
        job.reports(rank, more[1])  # type: ignore[arg-type]
    elif kind == "answers" and phase is not None:
        commits.setdefault(rank, _commit(bool(more[1]), bool(more[2])))
        job.say(rank, Done(rank, job.machine.attempt, phase, commits[rank]))
    elif kind == "fails" and phase is not None:
        job.say(rank, Failed(rank, job.machine.attempt, phase, "told to"))
    elif kind == "finishes":
        job.finishes(rank)
    elif kind == "beats":
        job.beat(rank, activity=more[1], waiting=more[2])  # type: ignore[arg-type]
    elif kind == "passes":
        job.passes(more[0], step=0.25)  # type: ignore[arg-type]
    elif kind == "terminates":
        job.terminate()
    elif kind == "all answer" and phase is not None:
        for one in range(4):
            job.say(one, Done(one, job.machine.attempt, phase, commits.setdefault(one, _commit(bool(more[0]), True))))
    else:
        _play_return(job, str(kind), rank)


def _play_return(job: Job, kind: str, rank: int) -> None:
    if kind == "registers":
        _register(job, rank)
    elif kind == "ready":
        job.gets_ready(rank, tuple(Strategy))
    elif kind == "launches":
        job.launches(rank)
    elif kind == "dark":
        job.dark.add(rank)


def _register(job: Job, rank: int) -> None:
    """A new process of a rank registers, if the controller lets it."""
    pid = 9000 + job.pids
    if job.machine.refusal(register(rank, pid=pid), job.now, same_connection=False) is None:
        job.registers_again(rank)


class Witness:
    """Looks at every plan in the moment in which it is sent."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.targets: dict[int, int] = {}
        self.seen = 0

    def look(self) -> None:
        for one in self.job.outbox[self.seen :]:
            self._look_at(one)
        self.seen = len(self.job.outbox)

    def _look_at(self, one: Instruction) -> None:
        if (
            not isinstance(one, Send)
            or not isinstance(one.message, Do)
            or one.message.phase in (Phase.STOP, Phase.EXIT)
        ):
            return
        plan, attempt = one.message.plan, one.message.attempt
        if one.message.phase is Phase.RESUME and plan.strategy is Strategy.RETRY and not plan.sources:
            return  # to a rank that says it holds in a pause: nothing is recovered
        if plan.strategy is not Strategy.RELOAD:
            assert self.targets.setdefault(attempt, plan.target_step) == plan.target_step
        sources = {source.source for source in plan.sources}
        assert sources <= set(plan.participants)
        if plan.strategy in (Strategy.RETRY, Strategy.RESPAWN):
            assert not sources & set(plan.faulty)
        if one.message.phase in (Phase.REBUILD, Phase.REPAIR, Phase.ROLLBACK, Phase.RESUME):
            assert plan.participants == (0, 1, 2, 3)
        returning = {rank for rank, state in self.job.machine.roster.ranks.items() if state.returning}
        if attempt == self.job.machine.attempt and not self.job.machine.idle:
            assert not sources & (returning & set(plan.faulty))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(OFFERS, st.lists(EVENT, max_size=40), st.booleans())
def test_every_sequence_of_events_ends_idle_or_in_a_verdict(
    offers: tuple[Strategy, ...], events: list[tuple[object, ...]], with_agent: bool
) -> None:
    times = {"dump_timeout_seconds": 30, "phase_timeout_seconds": 30, "return_seconds": 60}
    job = Job(strategies=offers, with_agent=with_agent, nodes=2, **times)
    witness = Witness(job)
    commits: dict[int, CommitState] = {}
    for event in events:
        _play(job, event, commits)
        witness.look()
    # Nobody answers any more.
    before = job.machine.attempt
    job.passes(600, step=1.0)
    witness.look()
    assert job.machine.idle or job.machine.verdict is not None
    assert job.machine.attempt < before + 20


@settings(max_examples=300, deadline=None)
@given(st.sets(RANK, min_size=1, max_size=2), st.lists(st.tuples(st.booleans(), st.booleans()), min_size=4, max_size=4))
def test_a_completed_step_is_never_planned_away_and_every_participant_reaches_the_target(
    dead: set[int], answers: list[tuple[bool, bool]]
) -> None:
    job = Job()
    for rank in dead:
        job.dies(rank)
    job.decides()
    commits = {rank: _commit(*answers[rank]) for rank in range(4) if rank not in dead}
    for rank, commit in commits.items():
        job.say(rank, Done(rank, 1, Phase.STOP, commit))
    cleaning = job.sent(Phase.CLEAN)
    if not cleaning:
        return
    plan = next(iter(cleaning.values())).plan
    assert plan.target_step >= min(commit.step for commit in commits.values())
    for rank in plan.participants:
        assert plan.target_step in (commits[rank].step, commits[rank].at_gate)
    assert {source.replica_set.ranks for source in plan.sources} == {(0, 2), (1, 3)}
    assert all(source.source in plan.participants for source in plan.sources)
