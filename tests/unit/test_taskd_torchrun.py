"""torchrun with TaskD's agent, on a torch that hands over options which TaskD's function does not know."""

from __future__ import annotations

import runpy
import sys
import types
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "launch" / "kubernetes" / "mindcluster" / "torchrun.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    for name in ("taskd", "taskd.python", "taskd.python.adaptor", "taskd.python.adaptor.patch"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    return runpy.run_path(str(SCRIPT), run_name="torchrun")


def test_options_that_are_not_in_use_are_left_out(script: dict[str, Any]) -> None:
    def launch(config: str, entrypoint: str, args: list[str]) -> tuple[str, str, list[str]]:
        return config, entrypoint, args

    called = script["without_unknown_options"](launch)
    assert called("config", "train", ["a"], health_check_server=None) == ("config", "train", ["a"])
    with pytest.raises(TypeError, match="health_check_server"):
        called("config", "train", ["a"], health_check_server=object())


def test_options_that_are_known_are_handed_on(script: dict[str, Any]) -> None:
    def launch(config: str, *, health_check_server: object = 1) -> object:
        return health_check_server

    assert script["without_unknown_options"](launch)("config", health_check_server=None) is None
