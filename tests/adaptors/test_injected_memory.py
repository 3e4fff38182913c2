"""Memory errors on purpose: which tensors they overwrite, and what they raise."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from mindio_tft_patch.adaptors.injection import memory
from mindio_tft_patch.adaptors.porting import Protection, StepGate, inject_faults
from mindio_tft_patch.config import read_config
from mindio_tft_patch.errors import ConfigError
from mindio_tft_patch.fault_injection import ADAPTOR_KINDS, NotInjectedError, PlannedFault
from mindio_tft_patch.processor.detect import Detector
from mindio_tft_patch.processor.progress import ProgressBoard
from mindio_tft_patch.protocol.phases import Activity, FaultKind

FAULT = PlannedFault(rank=2, step=5, moment="forward", kind="memory_parameters")


@dataclass
class Buffer:
    grad_data: torch.Tensor


class Chunk(torch.nn.Sequential):
    """Like Megatron's DistributedDataParallel: `buffers` is a list, not a method."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        self.buffers = [Buffer(torch.zeros(30))]  # type: ignore[assignment]


@dataclass
class Leaf:
    optimizer: Any


@dataclass
class Chain:
    chained_optimizers: list[Any]


@dataclass
class Training:
    """Half of the parameters have main parameters, as a shard has."""

    model: list[Any] = field(default_factory=lambda: [Chunk()])
    main: list[torch.nn.Parameter] = field(default_factory=list)
    optimizer: Any = None

    def __post_init__(self) -> None:
        self.main = [torch.nn.Parameter(one.detach().clone()) for one in list(self.model[0].parameters())[:2]]
        inner = torch.optim.Adam(self.main)
        for parameter in self.main:
            parameter.grad = torch.ones_like(parameter)
        inner.step()
        self.optimizer = Chain([Leaf(inner), Leaf(None)])

    def broken(self) -> dict[str, bool]:
        """Which classes hold nothing but NaN; a class must be all or nothing."""
        state = self.optimizer.chained_optimizers[0].optimizer.state.values()
        classes = {
            "parameters": list(self.model[0].parameters()),
            "main_parameters": self.main,
            "moments": [one[name] for one in state for name in ("exp_avg", "exp_avg_sq")],
            "gradients": [self.model[0].buffers[0].grad_data, *(one.grad for one in self.main)],
        }
        found = {}
        for name, tensors in classes.items():
            broken = {bool(value) for tensor in tensors for value in tensor.isnan().flatten()}
            assert len(broken) == 1, f"{name} are half broken"
            found[name] = broken.pop()
        return found


@pytest.fixture
def board() -> ProgressBoard:
    return ProgressBoard(clock=lambda: 0.0)


@pytest.mark.parametrize("name", ["parameters", "main_parameters", "moments", "gradients"])
def test_a_memory_error_breaks_all_tensors_of_its_class_and_no_other(name: str, board: ProgressBoard) -> None:
    training = Training()
    kinds = memory.kinds(lambda: training, board, 2)
    with pytest.raises(RuntimeError, match="UCE ERROR") as raised:
        kinds[f"memory_{name}"](FAULT)
    assert [one for one, broken in training.broken().items() if broken] == [name]
    assert Detector().classify(raised.value) is FaultKind.MEMORY
    assert "RankID:2" in str(raised.value) and "ERR00100" in str(raised.value)


def test_step_counters_of_an_optimizer_are_no_moments(board: ProgressBoard) -> None:
    training = Training()
    memory.overwrite(memory.moments(training))
    steps = [one["step"] for one in training.optimizer.chained_optimizers[0].optimizer.state.values()]
    assert [float(step) for step in steps] == [1.0, 1.0]


def test_activations_break_in_the_forward_pass_that_follows_and_only_in_that(board: ProgressBoard) -> None:
    training = Training()
    memory.kinds(lambda: training, board, 0)["memory_activations"](FAULT)
    seen: list[torch.Tensor] = []
    training.model[0][2].register_forward_hook(lambda module, inputs, output: seen.append(output))
    with pytest.raises(RuntimeError, match="UCE ERROR"):
        training.model[0](torch.ones(3, 4))
    assert not any(training.broken().values())
    assert not training.model[0](torch.ones(3, 4)).isnan().any()


def test_a_multi_bit_error_has_a_time_and_breaks_what_is_being_updated(board: ProgressBoard) -> None:
    training = Training()
    ecc = memory.kinds(lambda: training, board, 0)["memory_ecc"]
    board.enter(Activity.UPDATE)
    with pytest.raises(RuntimeError, match=r"HBM MULTI BIT ECC ERROR.*time us= (\d+)\..*time is \1") as raised:
        ecc(FAULT)
    assert [one for one, broken in training.broken().items() if broken] == ["main_parameters", "moments"]
    assert Detector().classify(raised.value) is FaultKind.MEMORY


def test_a_multi_bit_error_outside_the_update_breaks_gradients(board: ProgressBoard) -> None:
    training = Training()
    with pytest.raises(RuntimeError, match="HBM MULTI BIT ECC"):
        memory.kinds(lambda: training, board, 0)["memory_ecc"](FAULT)
    assert [one for one, broken in training.broken().items() if broken] == ["gradients"]


def test_before_training_there_is_nothing_to_break_but_the_error_comes(board: ProgressBoard) -> None:
    acts = memory.kinds(lambda: None, board, 0)
    with pytest.raises(NotInjectedError, match="bit_flip finds no tensor"):  # there is no error of it that could come
        acts.pop("bit_flip")(PlannedFault(0, 1, "forward", "bit_flip"))
    for name, act in acts.items():
        with pytest.raises(RuntimeError, match=r"UCE ERROR|HBM MULTI BIT ECC"):
            act(PlannedFault(0, 1, "forward", name))


def test_every_memory_kind_of_a_schedule_can_be_done(board: ProgressBoard) -> None:
    named = {name for name in ADAPTOR_KINDS if name.startswith("memory_") or name == "bit_flip"}
    assert named == set(memory.kinds(lambda: None, board, 0))


# ---------------------------------------------------------------- a torch optimizer that nothing wraps


def plain(steps: int = 1) -> Training:
    """What a trainer of one's own hands over: modules, and torch's optimizer itself."""
    training = Training(model=[torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())])
    training.optimizer = torch.optim.AdamW(training.model[0].parameters())
    for _ in range(steps):
        training.model[0](torch.ones(3, 4)).sum().backward()
        training.optimizer.step()
    return training


def nan_in(tensors: Any) -> set[bool]:
    return {bool(one.isnan().all()) for one in tensors}


@pytest.mark.parametrize("name", ["memory_moments", "memory_ecc"])
def test_the_state_of_a_plain_optimizer_is_broken(name: str, board: ProgressBoard) -> None:
    training = plain()
    board.enter(Activity.UPDATE)
    with pytest.raises(RuntimeError, match=r"UCE ERROR|HBM MULTI BIT ECC"):
        memory.kinds(lambda: training, board, 0)[name](FAULT)
    states = training.optimizer.state.values()
    assert nan_in(one[key] for one in states for key in ("exp_avg", "exp_avg_sq")) == {True}
    assert nan_in(training.model[0].parameters()) == {name == "memory_ecc"}
    assert {float(one["step"]) for one in states} == {1.0}


def test_the_main_parameters_of_a_plain_optimizer_are_those_of_the_model(board: ProgressBoard) -> None:
    training = plain()
    with pytest.raises(RuntimeError, match="UCE ERROR"):
        memory.kinds(lambda: training, board, 0)["memory_main_parameters"](FAULT)
    assert nan_in(training.model[0].parameters()) == {True}


def test_a_bit_of_the_state_of_a_plain_optimizer_is_flipped(board: ProgressBoard) -> None:
    training = plain()
    before = [one.clone() for one in memory.moments(training)]
    memory.kinds(lambda: training, board, 0)["bit_flip"](FAULT)
    assert [torch.equal(*pair) for pair in zip(before, memory.moments(training), strict=True)].count(False) == 1


@pytest.mark.parametrize("name", ["memory_moments", "memory_main_parameters", "memory_gradients", "bit_flip"])
def test_where_there_is_nothing_to_break_no_error_comes_either(name: str, board: ProgressBoard) -> None:
    training = plain(0)
    training.optimizer = None
    with pytest.raises(NotInjectedError, match=f"{name} finds no tensor"):
        memory.kinds(lambda: training, board, 0)[name](replace(FAULT, kind=name))


def test_before_its_first_step_an_optimizer_has_no_state_and_the_error_comes_alone(board: ProgressBoard) -> None:
    training = plain(0)
    with pytest.raises(RuntimeError, match="UCE ERROR"):
        memory.kinds(lambda: training, board, 0)["memory_moments"](FAULT)


def test_an_optimizer_that_is_none_is_refused_when_it_is_handed_over() -> None:
    environ = {"TFT_INJECT": "rank=9,step=1,moment=forward,kind=memory_moments"}
    protection = Protection(read_config(["--enable-high-availability"], {"TFT_ADAPTOR": "own"}))
    gate = StepGate(protection.board, barrier=protection.barrier)
    with pytest.raises(ConfigError, match=r"inject_faults\(optimizer=...\): Chunk is no torch optimizer"):
        inject_faults(protection, gate, model=[Chunk()], optimizer=Chunk(), environ=environ)
