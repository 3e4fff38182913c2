"""Which programs are launchers, and which our own tools."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindio_tft_patch.program import Program, program_of


def main_module(name: str | None) -> dict[str, object]:
    return {"__main__": SimpleNamespace(__spec__=None if name is None else SimpleNamespace(name=name))}


@pytest.mark.parametrize(
    "argv0",
    ["/usr/bin/torchrun", "torchrun_ttp.py", "/x/torch/distributed/run.py", "torch/distributed/launch.py"],
)
def test_scripts_of_torchrun_are_torchrun(argv0: str) -> None:
    assert program_of(argv0, main_module(None), []) is Program.TORCHRUN


@pytest.mark.parametrize("argv0", ["/x/bin/ttprun", "mindio-tft"])
def test_our_own_tools_are_told_apart(argv0: str) -> None:
    assert program_of(argv0, main_module(None), []) is Program.OWN_TOOL


@pytest.mark.parametrize("argv0", ["pretrain_gpt.py", "/x/run.py", "", "-c", "/home/torchrun/train.py"])
def test_other_scripts_are_training(argv0: str) -> None:
    assert program_of(argv0, main_module(None), []) is Program.TRAINING


def test_python_m_is_seen_by_its_main_module_and_while_it_is_being_imported() -> None:
    assert program_of("/x/run.py", main_module("torch.distributed.run"), []) is Program.TORCHRUN
    original = ["python", "-m", "mindio_tft_patch.launch.ttprun", "--standalone"]
    assert program_of("-m", main_module(None), original) is Program.OWN_TOOL
    original = ["python", "-m", "mindio_tft_patch.launch.pretrain_gpt"]
    assert program_of("-m", main_module(None), original) is Program.TRAINING


def test_a_rank_that_imports_torchs_launcher_stays_a_rank() -> None:
    modules = main_module(None) | {"torch.distributed.run": object()}
    assert program_of("pretrain_gpt.py", modules, []) is Program.TRAINING
