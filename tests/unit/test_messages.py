from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindio_tft_patch.protocol.messages import (
    CommitState,
    Do,
    Done,
    DownMessage,
    Failed,
    FaultReport,
    Finished,
    Heartbeat,
    Plan,
    Progress,
    Ready,
    Register,
    ReplicaSet,
    Role,
    ShardSource,
    UpMessage,
    Welcome,
)
from mindio_tft_patch.protocol.phases import FaultKind, Phase, Strategy
from mindio_tft_patch.protocol.wire import encode

RANKS = st.lists(st.integers(0, 10**6), max_size=5).map(tuple)
SETS = st.builds(ReplicaSet, name=st.text(max_size=8), ranks=RANKS)
COMMITS = st.builds(CommitState)
PROGRESS = st.builds(Progress, commit=COMMITS, activity_seconds=st.floats(0, 1e6))
PLANS = st.builds(
    Plan,
    faulty=RANKS,
    participants=RANKS,
    sources=st.lists(st.builds(ShardSource, replica_set=SETS, source=st.integers(0, 9)), max_size=3).map(tuple),
)
UP = st.one_of(
    st.builds(Register, ranks=RANKS),
    st.builds(Ready, replica_sets=st.lists(SETS, max_size=3).map(tuple)),
    st.builds(Heartbeat, progress=PROGRESS),
    st.builds(FaultReport),
    st.builds(Done, commit=st.one_of(st.none(), COMMITS), seconds=st.floats(0, 1e6)),
    st.builds(Failed),
    st.builds(Finished),
)
DOWN = st.one_of(st.builds(Welcome), st.builds(Do, plan=PLANS))


def _limited(message: object) -> bytes:
    try:
        return msgspec.msgpack.encode(message)
    except OverflowError:  # MessagePack has 64 bits; ranks, steps and process ids are far below
        return b""


@settings(max_examples=50, deadline=None)
@given(UP)
def test_every_message_up_survives_the_wire(message: UpMessage) -> None:
    data = _limited(message)
    assert not data or msgspec.msgpack.decode(data, type=UpMessage) == message


@settings(max_examples=50, deadline=None)
@given(DOWN)
def test_every_message_down_survives_the_wire(message: DownMessage) -> None:
    data = _limited(message)
    assert not data or msgspec.msgpack.decode(data, type=DownMessage) == message


@given(st.binary(max_size=200))
def test_garbage_is_never_more_than_a_decode_error(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        msgspec.msgpack.decode(data, type=UpMessage)


def test_messages_are_frozen_and_carry_a_tag_of_their_own() -> None:
    kinds = [*get_args(UpMessage), *get_args(DownMessage)]
    assert all(kind.__struct_config__.frozen for kind in kinds)
    tags = [kind.__struct_config__.tag for kind in kinds]
    assert None not in tags
    assert len(set(tags)) == len(tags)


def test_fields_of_a_later_version_are_ignored() -> None:
    data = msgspec.msgpack.encode({"type": "finished", "rank": 3, "news": "?"})
    assert msgspec.msgpack.decode(data, type=UpMessage) == Finished(3)


def test_an_unknown_phase_is_refused() -> None:
    data = msgspec.msgpack.encode(Failed(0, 1, Phase.DUMP, "x")).replace(b"dump", b"lump")
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(data, type=UpMessage)


@pytest.mark.parametrize(
    "message",
    [
        FaultReport(1, FaultKind.EXCEPTION, "ValueError: bad \udcff", 3),
        Failed(1, 2, Phase.DUMP, "\ud800 no such file"),
        Done(1, 2, Phase.DUMP, CommitState(3), "/save/\udcff"),
        Register(Role.PROCESSOR, 1, 4, 7, "host\udcff"),
        Do(2, Phase.EXIT, Plan(Strategy.DUMP, "bad \udcff", sources=(ShardSource(ReplicaSet("\udcff", (0, 1)), 0),))),
        Welcome(1, False, "bad \udcff"),
    ],
)
def test_a_text_that_cannot_be_encoded_is_sent_in_words(message: UpMessage | DownMessage) -> None:
    kind = DownMessage if isinstance(message, (Do, Welcome)) else UpMessage
    got: Any = msgspec.msgpack.decode(encode(msgspec.msgpack.Encoder(), message), type=kind)
    assert type(got) is type(message)
    text = repr(got)
    assert "\\udcff" in text or "\\ud800" in text
    text.encode()
    # What arrives can be handed on, and everything else is as it was.
    msgspec.msgpack.encode(got)
    assert msgspec.structs.astuple(got)[0] == msgspec.structs.astuple(message)[0]
