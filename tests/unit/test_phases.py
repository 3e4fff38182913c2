from __future__ import annotations

from mindio_tft_patch.processor.handlers import Handlers
from mindio_tft_patch.protocol.phases import LADDER, PATHS, Phase, Strategy
from mindio_tft_patch.testing import FakeHandlers, check_handlers


def test_every_strategy_has_a_path_that_begins_with_stop() -> None:
    assert set(PATHS) == set(Strategy)
    assert all(path[0] is Phase.STOP for path in PATHS.values())


def test_every_path_ends_in_training_or_in_exit_and_passes_no_phase_twice() -> None:
    for path in PATHS.values():
        assert path[-1] in (Phase.RESUME, Phase.EXIT)
        assert len(set(path)) == len(path)


def test_the_ladder_holds_every_strategy_and_ends_in_exit() -> None:
    assert sorted(LADDER) == sorted(Strategy)
    assert LADDER[-1] is Strategy.EXIT


def test_every_phase_but_exit_is_a_method_of_the_handlers() -> None:
    for phase in Phase:
        assert hasattr(Handlers, phase.value) is (phase is not Phase.EXIT)


def test_the_fake_handlers_keep_the_contract() -> None:
    check_handlers(FakeHandlers(), rank=0)
