"""What a rollback refuses before it changes anything, in which order it restores, and what a resume drops."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindio_tft_patch.adaptors.device.unconnected import Unconnected
from mindio_tft_patch.adaptors.megatron import in_place, moe_statistics, reload, resume, rollback, train_state
from mindio_tft_patch.adaptors.megatron.data_source import DataSource, _known
from mindio_tft_patch.adaptors.megatron.iteration_end import EndOfStep
from mindio_tft_patch.adaptors.megatron.past import Checkpoint, Past
from mindio_tft_patch.adaptors.megatron.train_state import StepRecord, TrainState
from mindio_tft_patch.config import read_config
from mindio_tft_patch.errors import RecoveryError
from mindio_tft_patch.processor.progress import ProgressBoard
from mindio_tft_patch.protocol.messages import Plan
from mindio_tft_patch.protocol.phases import Strategy


class Drawing:
    """A loader that draws from torch's default generator when it begins to be read, as torch's own does."""

    batch_sampler = SimpleNamespace(consumed_samples=0)

    def __iter__(self) -> Any:
        torch.rand(())
        return iter([1, 2, 3])


def drawing_source(*, cyclic: bool = False) -> DataSource:
    source = DataSource()
    source._train_loaders, source._valid_loaders = [_known(Drawing(), cyclic)], [_known(Drawing(), cyclic)]
    source.attach(SimpleNamespace(iterable=iter([])), SimpleNamespace(iterable=iter([])), 0)
    return source


def foreign_source() -> DataSource:
    source = DataSource()
    source.attach(SimpleNamespace(iterable=iter([])), None, 0)
    return source


class _State(TrainState):
    """A record of step 4 alone."""

    def __init__(self, states: dict[str, Any]) -> None:
        self.restored = False
        self.record = StepRecord(4, 8, 0, 2, 8, rng=states, rng_at_commit=states)

    def restore(self, *, repeat_end: bool = False) -> StepRecord:
        self.restored = True
        self.restore_generators(repeat_end=repeat_end)
        return self.record


class _Anything:
    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank without Megatron, whose only generator is torch's."""
    monkeypatch.setattr(train_state, "set_rng_states", lambda states: torch.set_rng_state(states["torch"]))
    monkeypatch.setattr(rollback.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(moe_statistics, "put_back", lambda _: None)


def back(state: TrainState, data: DataSource, *, returning: bool) -> None:
    anything: Any = _Anything()
    rollback.rollback(
        Plan(Strategy.RESPAWN, "a fault", target_step=4),
        args=SimpleNamespace(eval_interval=4, do_valid=True, consumed_valid_samples=0),
        state=state,
        data=data,
        log_state=anything,
        position=None,
        marks=anything,
        ending=anything,
        returning=returning,
    )


@pytest.mark.parametrize("returning", [True, False])
@pytest.mark.parametrize("repeats", [True, False])
@pytest.mark.parametrize("cyclic", [True, False])
def test_generators_are_restored_after_the_data(
    alone: None, monkeypatch: pytest.MonkeyPatch, returning: bool, repeats: bool, cyclic: bool
) -> None:
    end = EndOfStep(step=4, losses=None, result=(), logged=False, evaluated=False, saved=False) if repeats else None
    monkeypatch.setattr(rollback, "_agree", lambda *_: end)
    data, wanted = drawing_source(cyclic=cyclic), torch.get_rng_state()
    back(_State({"torch": wanted}), data, returning=returning)
    if returning:
        next(data.train[0])  # a first step that reads data
    assert torch.equal(torch.get_rng_state(), wanted)


def test_data_that_cannot_be_placed_is_refused_before_anything_is_changed(alone: None) -> None:
    state = _State({"torch": torch.get_rng_state()})
    with pytest.raises(RecoveryError, match="dataloader-type external"):
        back(state, foreign_source(), returning=True)
    training: Any = SimpleNamespace(args=SimpleNamespace(iteration=9), past=Past())
    anything: Any = _Anything()
    pytest.importorskip("megatron.training.checkpointing")
    with pytest.raises(RecoveryError, match="dataloader-type external"):
        reload.load(Checkpoint("nowhere", 4), training, foreign_source(), anything, anything)
    assert not state.restored and training.args.iteration == 9


def test_a_job_whose_data_cannot_be_placed_offers_only_what_needs_no_placing() -> None:
    flags = ["--enable-high-availability", "--enable-hbmfault-repair", "--enable-worker-reboot"]
    config = read_config(flags, {"RANK": "0", "WORLD_SIZE": "2"})
    anything: Any = _Anything()
    one = in_place.InPlace(config, ProgressBoard(), anything, anything, Unconnected())
    one.data = drawing_source()
    assert one.strategies == (Strategy.RETRY, Strategy.RESPAWN, Strategy.RELOAD)
    one.data = foreign_source()
    assert one.strategies == (Strategy.RETRY,)
    for strategy in (Strategy.RESPAWN, Strategy.RELOAD):
        with pytest.raises(RecoveryError, match="dataloader-type external"):
            one.rebuild(Plan(strategy, "a fault", target_step=4), anything, anything, 1)


def test_a_resumed_rank_has_no_plan_of_earlier_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    helpers = ("_restore_micro_batches", "_forget_sync_functions", "_reset_timers", "_forget_cached_answers")
    for name in (*helpers, "_abandon_asynchronous_saves"):
        monkeypatch.setattr(resume, name, lambda *_: None)
    context = {"save_strategy": 1, "load_strategy": 2, "local_checkpoint_cache": 3, "local_checkpoint_manager": 4}
    args = SimpleNamespace()
    place = rollback.Place(4, None)
    resume.resume(place, args=args, model=[], optimizer=None, rerun_mode=None, checkpointing_context=context)
    assert context == {"local_checkpoint_manager": 4}
    resume.resume(place, args=args, model=[], optimizer=None, rerun_mode=None)
