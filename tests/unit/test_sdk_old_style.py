"""The first generation of names, in the order in which the first seed calls them."""

from __future__ import annotations

from typing import Any

import pytest
from support.sdk_rank import as_current, make_processor

from mindio_tft_patch.adaptors.sdk import controller, old_style
from mindio_tft_patch.errors import ConfigError
from mindio_tft_patch.protocol.messages import CommitState, Finished, Ready, ReplicaSet, Welcome
from mindio_tft_patch.protocol.phases import Strategy
from mindio_tft_patch.testing import FakeChannel


def test_a_training_loop_that_was_edited_by_hand_is_protected(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[Any, ...]] = []
    monkeypatch.setattr(controller, "tft_init_controller", lambda *given: started.append(given))
    monkeypatch.setattr(controller, "tft_start_controller", lambda *given: started.append(given))
    channel = FakeChannel(Welcome(0, True))

    @old_style.ttp_to_persist
    def train() -> int:
        dp_ranks = [0, 1, 2, 3]
        old_style.ttp_init_controller(0, 4, len(dp_ranks) // 2, False)
        old_style.ttp_start_controller("127.0.0.1", 8000)
        old_style.ttp_init_processor(0, dp_ranks, len(dp_ranks), 4, len(dp_ranks) // 2, False)
        old_style.ttp_start_processor("127.0.0.1", 8000)
        old_style.ttp_register_save_ckpt_handler(print)
        old_style.ttp_register_rename_handler(print)
        old_style.ttp_start_updating_os(-1)
        old_style.ttp_end_updating_os(1)
        old_style.ttp_set_ckpt_args((1, "model"))
        assert processor.step_args == (1, "model")
        assert processor.updates.commit() == CommitState(step=1)
        return 1

    with as_current(make_processor(channel)) as processor:
        assert train() == 1
    assert started == [(0, 4, False), ("127.0.0.1", 8000, False, "")]
    assert channel.wait_for(Ready) == Ready(0, 0, (ReplicaSet("dense", (0, 2)),), (Strategy.DUMP,), restarts=False)
    assert channel.wait_for(Finished)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0, [0, 1], 3, 2, 1, False), "dp_size is 3"),
        ((0, {0, 1}, 2, 2, 1, False), "dp_ranks is"),
        ((0, [0], 1, 1, 0, False), "replica_offset is 0"),
        ((0, [0, 1, 2], 3, 3, 2, False), "cannot be cut into parts of 2"),
        ((5, [5, 6], 2, 2, 1, False), "rank is 5"),
    ],
)
def test_a_data_parallel_group_that_cannot_be_cut_is_refused(arguments: tuple[Any, ...], said: str) -> None:
    with as_current(make_processor()), pytest.raises(ConfigError, match=said):
        old_style.ttp_init_processor(*arguments)


def test_the_controller_needs_a_part_of_a_size() -> None:
    with pytest.raises(ConfigError, match="replica_offset"):
        old_style.ttp_init_controller(0, 4, 0, False)
