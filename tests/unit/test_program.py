"""Which processes are launchers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindio_tft_patch.launch.patience import is_launcher_process


def main_module(name: str | None) -> dict[str, object]:
    return {"__main__": SimpleNamespace(__spec__=None if name is None else SimpleNamespace(name=name))}


@pytest.mark.parametrize(
    "argv0",
    ["/usr/bin/torchrun", "torchrun_ttp.py", "ttprun", "/x/torch/distributed/run.py", "torch/distributed/launch.py"],
)
def test_scripts_that_launch_ranks_are_launchers(argv0: str) -> None:
    assert is_launcher_process(argv0, main_module(None))


@pytest.mark.parametrize("argv0", ["pretrain_gpt.py", "/x/run.py", "", "-c", "/home/torchrun/train.py"])
def test_other_scripts_are_not(argv0: str) -> None:
    assert not is_launcher_process(argv0, main_module(None))


def test_python_m_is_seen_by_its_main_module_and_while_it_is_being_imported() -> None:
    assert is_launcher_process("/x/run.py", main_module("torch.distributed.run"))
    original = ["python", "-m", "mindio_tft_patch.launch.ttprun", "--standalone"]
    assert is_launcher_process("-m", main_module(None), original)
    assert not is_launcher_process("-m", main_module(None), ["python", "-m", "mindio_tft_patch.launch.pretrain_gpt"])


def test_a_rank_that_imports_torchs_launcher_stays_a_rank() -> None:
    modules = main_module(None) | {"torch.distributed.run": object()}
    assert not is_launcher_process("pretrain_gpt.py", modules)
