"""The table of patches for MindSpeed-LLM."""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from mindio_tft_patch.adaptors.megatron import patches as megatron
from mindio_tft_patch.adaptors.megatron.session import Session
from mindio_tft_patch.adaptors.mindspeed_llm import patches
from mindio_tft_patch.config import Config
from mindio_tft_patch.errors import ConfigError
from mindio_tft_patch.patching import Patch

CONFIG = Config(high_availability=True, hbmfault_repair=True, worker_reboot=True)


@pytest.fixture(scope="module")
def tables() -> tuple[list[Patch], list[Patch]]:
    """For plain Megatron and for MindSpeed-LLM."""
    session = Session(CONFIG)
    return megatron.table(session, lambda: None), patches.table(session, lambda: None)


def test_what_mindspeed_llm_runs_instead_is_patched_there(tables: tuple[list[Patch], list[Patch]]) -> None:
    plain, own = ([patch.target for patch in table] for table in tables)
    gone = [target for target in plain if target not in own]
    new = [target for target in own if target not in plain]
    names = ("pretrain", "train", "training_log")
    assert gone == [f"megatron.training.training:{name}" for name in names]
    assert set(new) == {f"mindspeed_llm.training.training:{name}" for name in names}


def test_nothing_else_of_the_protection_is_lost(tables: tuple[list[Patch], list[Patch]]) -> None:
    plain, own = tables
    parser = "megatron.training.arguments:parse_args"
    kept = {(patch.point, patch.why) for patch in plain if patch.target != parser}
    assert kept <= {(patch.point, patch.why) for patch in own}


def _wrapper(name: str) -> Any:
    """Of the patch that hides the flags there: the last of its target, and so the first to be called."""
    return [patch.wrapper for patch in patches.table(Session(CONFIG), lambda: None) if patch.target.endswith(name)][-1]


def test_the_flags_of_the_command_line_are_hidden_from_mindspeed_llm_after_parsing() -> None:
    parsed = _wrapper(":parse_args")(lambda: Namespace(enable_high_availability=True), None, (), {})
    assert parsed.enable_high_availability is False


def test_the_arguments_are_checked_before_they_are_accepted() -> None:
    validate = _wrapper(":validate_args")
    good = Namespace(enable_high_availability=True)
    assert validate(lambda arguments: arguments, None, (good,), {}).enable_high_availability is False
    with pytest.raises(ConfigError, match="--reuse-fp32-param"):
        validate(lambda arguments: arguments, None, (Namespace(reuse_fp32_param=True),), {})


def test_only_scripts_that_call_pretrain_are_protected() -> None:
    entry = patches._Entry()

    def train() -> str:
        return str(entry.train(lambda: "trained", None, (), {}))

    assert entry.pretrain(train, None, (), {}) == "trained"
    with pytest.raises(ConfigError, match=r"only pretrain_gpt\.py"):
        train()


class Chunk:
    """A model chunk whose all-gather MindSpeed binds to one kind of parameters for the time of an update."""

    def start_param_sync(self, dense_or_moe_group: str | None = None) -> str | None:
        return dense_or_moe_group


def _update(chunk: Chunk, *, fails: bool) -> None:
    chunk.start_param_sync = partial(chunk.start_param_sync, dense_or_moe_group="dense")  # type: ignore[method-assign]
    if fails:
        raise RuntimeError("FORCE STOP")
    chunk.start_param_sync = chunk.start_param_sync.func  # type: ignore[attr-defined,method-assign]


def test_an_interrupted_update_does_not_leave_the_all_gather_bound_to_dense_parameters() -> None:
    chunk = Chunk()
    step = _wrapper("DistributedOptimizer.step_with_ready_grads")
    with pytest.raises(RuntimeError, match="FORCE STOP"):
        step(lambda: _update(chunk, fails=True), SimpleNamespace(model_chunks=[chunk]), (), {})
    assert chunk.start_param_sync() is None


def test_a_complete_update_is_left_as_it_is() -> None:
    chunk = Chunk()
    step = _wrapper("DistributedOptimizer.step_with_ready_grads")
    step(lambda: _update(chunk, fails=False), SimpleNamespace(model_chunks=[chunk]), (), {})
    assert chunk.start_param_sync() is None and "start_param_sync" in vars(chunk)
