"""Taking the place of MindSpeed-LLM's own high availability, as far as that can be seen without MindSpeed-LLM."""

from __future__ import annotations

import importlib
import sys
import types
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindio_tft_patch.adaptors.mindspeed_llm import detection, feature, refused
from mindio_tft_patch.config import read_config
from mindio_tft_patch.errors import ConfigError, PatchError
from mindio_tft_patch.patching import PatchManager

# ---------------------------------------------------------------------- the switch


def test_the_plugin_protects_a_job_unless_told_otherwise() -> None:
    assert read_config([], {}).mindspeed == "plugin"
    assert read_config([], {"TFT_MINDSPEED": "sdk"}).mindspeed == "sdk"


def test_another_word_is_replaced_by_the_default_with_a_warning() -> None:
    config = read_config([], {"TFT_MINDSPEED": "both"})
    assert config.mindspeed == "plugin"
    assert "TFT_MINDSPEED='both'" in config.warnings[0]


# ---------------------------------------------------------------------- who comes first


class Tree:
    """A MindSpeed whose patcher imports a Megatron, in packages that nobody else has."""

    patcher, loop = "tft_fake_speed.patcher", "tft_fake_megatron.training"

    def __init__(self, folder: Path) -> None:
        self.calls: list[str] = []
        self._write(
            folder / "tft_fake_megatron" / "training" / "__init__.py", "import tft_fake_megatron.training.loop\n"
        )
        self._write(folder / "tft_fake_megatron" / "training" / "loop.py", "")
        self._write(
            folder / "tft_fake_speed" / "patcher.py",
            "import tft_fake_megatron.training\ntft_fake_megatron.training.replaced = True\n",
        )

    @staticmethod
    def _write(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def wait(self) -> None:
        """Begin to wait for one of the two."""
        detection.when_ready(
            patched=lambda: self._note("patched"),
            plain=lambda: self.calls.append("plain"),
            patcher=self.patcher,
            loop=self.loop,
        )

    def _note(self, word: str) -> None:
        # At this moment the patcher must have ended, not only begun.
        self.calls.append(word if hasattr(sys.modules[self.loop], "replaced") else "too early")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tree]:
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Tree(tmp_path)
    for name in [name for name in sys.modules if name.startswith("tft_fake_")]:
        del sys.modules[name]


def test_megatron_is_patched_after_mindspeed_has_patched_it(tree: Tree) -> None:
    tree.wait()
    assert tree.calls == []
    importlib.import_module(tree.patcher)
    assert tree.calls == ["patched"]


def test_a_script_of_plain_megatron_is_not_kept_waiting_for_mindspeed(tree: Tree) -> None:
    tree.wait()
    importlib.import_module(tree.loop)
    assert tree.calls == ["plain"]


def test_nothing_is_patched_twice(tree: Tree) -> None:
    tree.wait()
    importlib.import_module(tree.loop)
    importlib.import_module(tree.patcher)
    assert tree.calls == ["plain"]


def test_without_mindspeed_llm_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "mindspeed_llm", raising=False)
    importlib.invalidate_caches()
    assert not detection.beside_megatron()


# ---------------------------------------------------------------------- its own feature


class HighAvailabilityFeature:
    """Has the methods of the real one."""

    def __init__(self) -> None:
        self.acted: list[str] = []

    def register_args(self, parser: object) -> None:
        self.acted.append("register_args")

    def pre_validate_args(self, args: object) -> None:
        self.acted.append("pre_validate_args")

    def validate_args(self, args: object) -> None:
        raise AssertionError("High availability feature requires the SDK")

    def pre_register_patches(self, patch_manager: object, args: object) -> None:
        self.acted.append("pre_register_patches")

    def register_patches(self, patch_manager: object, args: object) -> None:
        self.acted.append("register_patches")


def _module(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    module = types.ModuleType(feature.MODULE)
    module.HighAvailabilityFeature = kind  # type: ignore[attr-defined]
    parts = feature.MODULE.split(".")
    for number in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:number]), types.ModuleType(".".join(parts[:number])))
    monkeypatch.setitem(sys.modules, feature.MODULE, module)


def test_mindspeeds_own_feature_registers_its_flags_and_does_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    _module(monkeypatch, HighAvailabilityFeature)
    manager = PatchManager()
    manager.apply(feature.patches(), "")
    theirs = HighAvailabilityFeature()
    theirs.register_args(None)
    theirs.pre_register_patches(None, None)
    theirs.pre_validate_args(None)
    theirs.validate_args(None)
    theirs.register_patches(None, None)
    assert theirs.acted == ["register_args"]
    assert manager.unreached() == []
    manager.revert()
    theirs.register_patches(None, None)
    assert theirs.acted == ["register_args", "register_patches"]


def test_a_feature_with_other_methods_is_refused_before_anything_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Renamed:
        def validate_args(self, args: object) -> None: ...

    _module(monkeypatch, Renamed)
    with pytest.raises(PatchError, match=r"3 patch target.*pre_register_patches"):
        PatchManager().apply(feature.patches(), "")


def test_its_code_is_told_that_the_flags_are_off() -> None:
    arguments = Namespace(enable_high_availability=True, enable_worker_reboot=True, lr=1.0)
    feature.hide_switches(arguments)
    assert vars(arguments) == {
        "enable_high_availability": False,
        "enable_hbmfault_repair": False,
        "enable_worker_reboot": False,
        "distributed_optimizer_no_replica": False,
        "enable_elastic_training": False,
        "lr": 1.0,
    }


# ---------------------------------------------------------------------- what does not go together


def test_options_that_cannot_work_are_refused_all_at_once() -> None:
    arguments = Namespace(reuse_fp32_param=True, schedules_method="dualpipev", swap_attention=False)
    with pytest.raises(ConfigError) as refusal:
        refused.check(arguments)
    assert "Remove --reuse-fp32-param" in str(refusal.value)
    assert "Remove --schedules-method dualpipev" in str(refusal.value)
    assert "swap-attention" not in str(refusal.value)


def test_other_values_of_the_same_options_pass() -> None:
    refused.check(Namespace(schedules_method=None, layerzero=False))
    refused.check(Namespace())
