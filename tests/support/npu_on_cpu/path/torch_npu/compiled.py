"""Operators that MindSpeed compiles for the NPU when they are first used: the builder is given them as if it had."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import torch
import wrapt

from torch_npu.operators import npu_rotary_mul


def npu_rotary_position_embedding(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: int) -> torch.Tensor:
    """Rotary position embedding. x: [..., head]. mode: 0: the second half of a head is turned against the first."""
    if mode != 0:
        raise NotImplementedError("only mode 0 (halves) has a stand-in")
    return npu_rotary_mul(x, cos, sin)


def install() -> None:
    """Have MindSpeed find them."""
    wrapt.register_post_import_hook(_give, "mindspeed.op_builder.builder")


def _give(module: ModuleType) -> None:
    loaded = module.MindSpeedOpBuilder._loaded_ops
    loaded["npu_rotary_position_embedding"] = SimpleNamespace(
        npu_rotary_position_embedding=npu_rotary_position_embedding
    )
