"""The NPU's fused operators that MindSpeed-LLM's example scripts switch on, computed with torch's own."""

from __future__ import annotations

from typing import Any

import torch


def npu_rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """Root-mean-square norm, and the reciprocal of the deviation.

    x: [..., hidden]. gamma: [hidden].
    """
    wide = x.float()
    reciprocal = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide * reciprocal * gamma.float()).to(x.dtype), reciprocal


def npu_swiglu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Swish of the first half times the second.

    x: [..., 2 * hidden] in dimension `dim`.
    """
    gate, value = torch.chunk(x, 2, dim=dim)
    return torch.nn.functional.silu(gate) * value


def npu_rotary_mul(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary_mode: str = "half") -> torch.Tensor:
    """Rotary position embedding.

    x: [..., head]. cos, sin: broadcast to x.
    """
    if rotary_mode != "half":
        raise NotImplementedError(f"rotary_mode {rotary_mode!r} has no stand-in")
    first, second = torch.chunk(x, 2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def npu_fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Any = None,
    padding_mask: Any = None,
    atten_mask: torch.Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    **_unused: Any,
) -> tuple[torch.Tensor]:
    """Causal attention in layout SBH, the one of Megatron without packed sequences.

    query, key, value: [sequence, batch, heads * head].
    """
    if input_layout != "SBH" or pse is not None or padding_mask is not None:
        raise NotImplementedError(f"attention in layout {input_layout} (or with position shift or padding mask)")
    sequence, batch, hidden = query.shape
    heads_first = [
        one.reshape(one.shape[0], batch, -1, hidden // head_num).permute(1, 2, 0, 3) for one in (query, key, value)
    ]
    result = torch.nn.functional.scaled_dot_product_attention(
        *heads_first,
        is_causal=atten_mask is not None,
        scale=scale,
        dropout_p=1.0 - keep_prob,
        enable_gqa=key.shape[2] != hidden,
    )
    return (result.permute(2, 0, 1, 3).reshape(sequence, batch, hidden),)
