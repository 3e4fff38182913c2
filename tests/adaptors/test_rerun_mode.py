"""An evaluation that is interrupted leaves Megatron's rerun machine as it was before: all ranks save the same keys."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from mindio_tft_patch.adaptors.megatron.resume import rerun_mode_survives
from mindio_tft_patch.errors import Interrupted


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    machine = SimpleNamespace(mode="validate")
    machine.get_mode = lambda: machine.mode
    module = ModuleType("megatron.core.rerun_state_machine")
    vars(module).update(get_rerun_state_machine=lambda: machine)
    monkeypatch.setitem(sys.modules, "megatron.core.rerun_state_machine", module)
    return machine


def test_the_mode_comes_back_when_an_evaluation_is_interrupted(machine: SimpleNamespace) -> None:
    with pytest.raises(Interrupted), rerun_mode_survives():
        machine.mode = "disabled"
        raise Interrupted
    assert machine.mode == "validate"


def test_an_evaluation_that_ends_well_has_put_it_back_itself(machine: SimpleNamespace) -> None:
    with rerun_mode_survives():
        machine.mode = "disabled"
        machine.mode = "of the evaluation"
    assert machine.mode == "of the evaluation"
