"""The end of an iteration, repeated without computing the step again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindio_tft_patch.adaptors.device import cpu
from mindio_tft_patch.adaptors.megatron.gate import CommitGate
from mindio_tft_patch.adaptors.megatron.iteration_end import EndOfStep, IterationEnd
from mindio_tft_patch.adaptors.megatron.session import Session
from mindio_tft_patch.processor.progress import ProgressBoard


@pytest.fixture(autouse=True)
def _on_cpu() -> Any:
    cpu.install_cpu_stand_in()
    yield
    cpu.uninstall_cpu_stand_in()


class Loop:
    """The part of a training loop that matters."""

    def __init__(self) -> None:
        gate = CommitGate(
            ProgressBoard(), barrier=lambda: None, next_step=lambda: self.steps + 1, record=lambda step, skipped: None
        )
        self.steps = 0
        self.computed = 0
        self.updated = 0
        self.gate = gate
        self.ending = IterationEnd(gate)
        self.forward_backward = self.ending.around_get_forward_backward(lambda: self._compute, None, (), {})

    def _compute(self, *, forward_only: bool) -> list[dict[str, Any]]:
        self.computed += 1
        return [{"lm loss": torch.tensor([4.0, 2.0])}]

    def _update(self) -> tuple[Any, ...]:
        self.updated += 1
        return True, 1.5, None

    def step(self) -> tuple[float, tuple[Any, ...]]:
        """Loss and what the optimizer returned."""
        with self.ending.step():
            losses = self.forward_backward(forward_only=False)
            result = self.gate.around_step(self._update, object(), (), {})
        self.steps += 1
        return float(losses[0]["lm loss"][0] / losses[0]["lm loss"][1]), result


def test_the_repeated_iteration_answers_with_what_was_computed_before() -> None:
    loop = Loop()
    loop.ending.repeat(EndOfStep(step=1, losses={"lm loss": ("sum", [9.0, 3.0])}, result=(True, 0.25, 7)))
    assert loop.step() == (3.0, (True, 0.25, 7))
    assert (loop.computed, loop.updated) == (0, 0)


def test_the_iteration_after_it_is_a_real_one() -> None:
    loop = Loop()
    loop.ending.repeat(EndOfStep(step=1, losses={"lm loss": ("sum", [9.0, 3.0])}, result=(True, 0.25, 7)))
    loop.step()
    assert loop.step() == (2.0, (True, 1.5, None))
    assert (loop.computed, loop.updated) == (1, 1)
    assert loop.ending.repeated is None


def test_an_evaluation_in_between_is_computed() -> None:
    loop = Loop()
    loop.ending.repeat(EndOfStep(step=1, losses=None, result=(False, None, None)))
    with loop.ending.step():
        assert loop.forward_backward(forward_only=False) == []
    assert len(loop.forward_backward(forward_only=True)) == 1


def test_what_was_finished_before_the_fault_is_left_out() -> None:
    loop = Loop()
    loop.ending.repeat(EndOfStep(step=3, evaluated=True, saved=True))
    assert loop.ending.leaves_out_evaluation and loop.ending.leaves_out_save
    loop.ending.forget()
    assert not loop.ending.leaves_out_evaluation and not loop.ending.leaves_out_save


def test_a_fault_in_the_repeated_end_lets_the_optimizer_work_again_afterwards() -> None:
    loop = Loop()
    loop.ending.repeat(EndOfStep(step=1, result=(True, 0.25, 7)))
    with pytest.raises(RuntimeError), loop.ending.step():
        raise RuntimeError
    loop.ending.forget()
    assert loop.step() == (2.0, (True, 1.5, None))


def test_what_comes_after_train_is_no_part_of_a_repeated_last_step() -> None:
    loop = Loop()
    loop.ending.repeat(EndOfStep(step=3, losses={"lm loss": ("sum", [9.0, 3.0])}, evaluated=True, saved=True))
    loop.step()
    assert loop.ending.leaves_out_evaluation  # the one of the step itself
    offers: list[bool] = []
    session: Any = SimpleNamespace(
        _handlers=SimpleNamespace(inside=True),
        in_place=SimpleNamespace(ending=loop.ending),
        protection=SimpleNamespace(offer=lambda: offers.append(True)),
    )
    Session.left_train(session)
    assert not loop.ending.leaves_out_evaluation and not loop.ending.leaves_out_save
    assert loop.gate.answer is None and offers == [True]
