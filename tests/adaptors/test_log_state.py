"""The training log goes on after a dump as if nothing had happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mindio_tft_patch.adaptors.megatron.log_state import FILE_NAME, LogState


class Log:
    """Adds up losses as Megatron's training_log does; newer releases do not reset after the first iteration."""

    def __init__(self, state: LogState, interval: int = 1) -> None:
        self.interval = interval
        self.state = state
        self.sums: dict[str, Any] = {}
        self.first = True
        self.lines: list[float] = []

    def write(self, iteration: int, loss: float) -> None:
        kwargs = {"is_first_iteration": self.first}
        self.first = False
        self.state.around_training_log(self._training_log, None, ({"lm loss": loss}, self.sums, iteration), kwargs)

    def _training_log(self, losses: Any, sums: Any, iteration: int, is_first_iteration: bool) -> None:
        sums["advanced iterations"] = sums.get("advanced iterations", 0) + 1
        sums["lm loss"] = sums.get("lm loss", torch.tensor([0.0])) + losses["lm loss"]
        self.lines.append(float(sums["lm loss"]) / sums["advanced iterations"])
        if not is_first_iteration and iteration % self.interval == 0:
            sums["lm loss"] = torch.tensor([0.0])
            sums["advanced iterations"] = 0


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.tensor

    def on_cpu(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "tensor", on_cpu)


LOSSES = {1: 5.1, 2: 4.7, 3: 4.4, 4: 4.2}


@pytest.mark.parametrize("fault_after", [1, 2, 3])
def test_a_resumed_job_logs_what_an_unbroken_one_logs(tmp_path: Path, fault_after: int) -> None:
    unbroken = Log(LogState())
    for iteration, loss in LOSSES.items():
        unbroken.write(iteration, loss)

    state = LogState()
    state.resume(0, None, 1)
    broken = Log(state)
    for iteration in range(1, fault_after + 1):
        broken.write(iteration, LOSSES[iteration])
    for name, content in state.files(fault_after).items():
        (tmp_path / name).write_bytes(content)

    state = LogState()
    state.resume(fault_after, tmp_path, 1)
    resumed = Log(state)
    for iteration in range(fault_after + 1, 5):
        resumed.write(iteration, LOSSES[iteration])
    assert broken.lines + resumed.lines == unbroken.lines


def test_an_ordinary_checkpoint_at_the_end_of_an_interval_needs_no_file(tmp_path: Path) -> None:
    state = LogState()
    state.resume(2, tmp_path, 1)
    log = Log(state)
    log.write(3, LOSSES[3])
    log.write(4, LOSSES[4])
    assert log.lines == [pytest.approx(4.4), pytest.approx(4.2)]


def test_in_mid_interval_without_a_file_megatrons_own_behaviour_stays(tmp_path: Path) -> None:
    state = LogState()
    state.resume(3, tmp_path, 10)
    log = Log(state)
    log.write(4, 4.0)
    log.write(5, 2.0)
    assert log.lines == [4.0, 3.0]


@pytest.mark.parametrize("content", ["", "{", json.dumps({"iteration": 9, "sums": {}})])
def test_a_file_that_is_broken_or_of_another_step_is_left_alone(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE_NAME).write_text(content)
    state = LogState()
    state.resume(2, tmp_path, 1)
    log = Log(state)
    log.write(3, 3.0)
    assert log.lines == [3.0]


def test_an_interval_that_ended_without_its_line_is_not_averaged_into_the_next(tmp_path: Path) -> None:
    state = LogState()
    state.resume(0, None, 3)
    log = Log(state, interval=3)
    log.first = False
    log.write(1, 5.0)
    log.write(2, 4.0)
    (kept,) = state.files(2).values()
    assert json.loads(kept)["sums"] == {"advanced iterations": 2, "lm loss": {"float32": [9.0]}}
    (kept,) = state.files(3).values()  # step 3 was committed and never logged
    assert json.loads(kept)["sums"] == {"advanced iterations": 0, "lm loss": {"float32": [0.0]}}


def test_ranks_without_losses_write_no_file() -> None:
    state = LogState()
    state.around_training_log(lambda *args, **kwargs: None, None, ({}, {"advanced iterations": 3}, 1), {})
    assert state.files(3) == {}
