"""Whatever a cluster manager says, in whatever order, or leaves out: a recovery ends, and the manager knows how."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.control import register
from support.managed import ManagedJob

from mindio_tft_patch.controller.events import Report, ReportResult, ReportStopped, ReportStrategies, Send
from mindio_tft_patch.controller.vocabulary import CONTINUE, STRATEGIES
from mindio_tft_patch.protocol.messages import CommitState, Do, Done, Failed
from mindio_tft_patch.protocol.phases import FaultKind, Phase, Strategy

RANK = st.integers(0, 3)
RANKS = st.dictionaries(st.integers(0, 4), st.integers(0, 3), max_size=3)
OFFERS = st.sampled_from([(Strategy.DUMP,), (Strategy.RETRY, Strategy.DUMP), tuple(Strategy), ()])
WORD = st.sampled_from([*STRATEGIES, CONTINUE, "downgrade"])
EVENT = st.one_of(
    st.tuples(st.just("stop"), RANKS),
    st.tuples(st.just("names"), RANKS),
    st.tuples(st.just("chooses"), WORD),
    st.tuples(st.just("negotiates"), RANKS, WORD),
    st.tuples(st.just("pauses"), st.sampled_from([None, 0.0, 10.0])),
    st.tuples(st.just("saves_and_exits")),
    st.tuples(st.just("unheard")),
    st.tuples(st.just("dies"), RANK),
    st.tuples(st.just("reports"), RANK, st.sampled_from(FaultKind)),
    st.tuples(st.just("answers"), RANK, st.sampled_from([5, 6])),
    st.tuples(st.just("all answer")),
    st.tuples(st.just("fails"), RANK),
    st.tuples(st.just("finishes"), RANK),
    st.tuples(st.just("terminates")),
    st.tuples(st.just("registers"), RANK),
    st.tuples(st.just("ready"), RANK),
    st.tuples(st.just("passes"), st.sampled_from([0.1, 0.5, 3.0, 20.0])),
)


def _latest(job: ManagedJob, rank: int) -> Do | None:
    """The last command that a rank got."""
    found = [
        one.message
        for one in job.outbox
        if isinstance(one, Send) and isinstance(one.message, Do) and one.peer.index == rank
    ]
    return found[-1] if found else None


def _answer(job: ManagedJob, rank: int, step: int, *, fails: bool = False) -> None:
    do = _latest(job, rank)
    if do is None:
        return
    if fails:
        job.say(rank, Failed(rank, do.attempt, do.phase, "told to"))
    else:
        job.say(rank, Done(rank, do.attempt, do.phase, CommitState(step)))


def _all_answer(job: ManagedJob) -> None:
    for rank in range(4):
        _answer(job, rank, 5)


def _negotiate(job: ManagedJob, ranks: dict[int, int], word: str) -> None:
    """What random orders seldom come to: everything in its order, up to the choice."""
    ranks = {rank: kind for rank, kind in ranks.items() if rank < 4 and kind < 3}
    job.stop(ranks)
    job.passes(0.3, step=0.1)
    _all_answer(job)
    job.names(ranks)
    job.chooses(word)
    _all_answer(job)


def _play(job: ManagedJob, event: tuple[object, ...], with_agent: bool) -> None:
    kind, *more = event
    if kind in ("stop", "names", "chooses", "pauses", "saves_and_exits", "unheard"):
        getattr(job, str(kind))(*more)
    elif kind == "negotiates":
        _negotiate(job, *more)  # type: ignore[arg-type]
    elif kind == "dies" and with_agent:
        job.dies(*more)  # type: ignore[arg-type]
    elif kind == "reports":
        job.reports(*more)  # type: ignore[arg-type]
    elif kind == "answers":
        _answer(job, *more)  # type: ignore[arg-type]
    elif kind == "fails":
        _answer(job, more[0], 5, fails=True)  # type: ignore[arg-type]
    elif kind == "all answer":
        _all_answer(job)
    else:
        _play_the_rest(job, kind, more)


def _play_the_rest(job: ManagedJob, kind: object, more: list[object]) -> None:
    if kind == "finishes":
        job.finishes(*more)  # type: ignore[arg-type]
    elif kind == "terminates":
        job.terminate()
    elif kind == "passes":
        job.passes(*more, step=0.25)  # type: ignore[arg-type]
    elif kind == "registers":
        pid = 9000 + job.pids
        rank: int = more[0]  # type: ignore[assignment]
        if job.machine.refusal(register(rank, pid=pid), job.now, same_connection=False) is None:
            job.registers_again(rank)
    elif kind == "ready":
        job.gets_ready(*more, tuple(Strategy))  # type: ignore[arg-type]


def _is_a_documented(report: Report) -> bool:
    if isinstance(report, ReportStopped):
        return int(report.code) in (0, 400, 403, 404)
    if isinstance(report, ReportStrategies):
        return set(report.words) <= set(STRATEGIES) and report.words[-1] == "exit"
    if isinstance(report, ReportResult):
        return int(report.code) in (0, 405, 406, 499) and report.word in (*STRATEGIES, CONTINUE)
    return set(report.ranks.values()) <= {0, 1, 2}


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(OFFERS, st.lists(EVENT, max_size=40), st.booleans())
def test_every_sequence_of_orders_and_events_ends_idle_or_in_a_verdict_of_which_the_manager_knows(
    offers: tuple[Strategy, ...], events: list[tuple[object, ...]], with_agent: bool
) -> None:
    times = {"dump_timeout_seconds": 30, "phase_timeout_seconds": 30, "return_seconds": 60, "manager_seconds": 20}
    job = ManagedJob(strategies=offers, with_agent=with_agent, **times)
    for event in events:
        _play(job, event, with_agent)
    before = job.machine.attempt
    # Nobody says or answers anything any more.
    job.passes(900, step=1.0)
    assert job.machine.idle or job.machine.verdict is not None
    assert job.machine.attempt < before + 30
    assert all(map(_is_a_documented, job.told))
    if job.machine.verdict is not None:
        assert job.told_results[-1] == (0, job.machine.verdict.strategy.value)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(EVENT, max_size=40))
def test_without_a_manager_nothing_is_told_and_no_order_but_the_end_is_obeyed(events: list[tuple[object, ...]]) -> None:
    job = ManagedJob(attached=False)
    for event in events:
        if event[0] == "negotiates":
            continue
        if event[0] in ("stop", "names", "chooses", "pauses"):
            assert not getattr(job, str(event[0]))(*event[1:]).obeyed
        else:
            _play(job, event, with_agent=False)
    assert job.told == []
    assert job.sent(Phase.PAUSE) == {}
