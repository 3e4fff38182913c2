"""The operators of the stand-in for torch_npu compute what their names say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

FILE = Path(__file__).parents[1] / "support" / "npu_on_cpu" / "path" / "torch_npu" / "operators.py"


@pytest.fixture(scope="module")
def operators() -> ModuleType:
    """By its file: `torch_npu` itself is importable only in jobs that ask for it."""
    spec = importlib.util.spec_from_file_location("npu_on_cpu_operators", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def random() -> torch.Generator:
    """The same numbers in every run."""
    return torch.Generator().manual_seed(7)


def test_root_mean_square_norm(operators: ModuleType, random: torch.Generator) -> None:
    x, gamma = torch.randn(3, 2, 8, generator=random), torch.randn(8, generator=random)
    result, _ = operators.npu_rms_norm(x, gamma, epsilon=1e-5)
    torch.testing.assert_close(result, torch.nn.functional.rms_norm(x, (8,), gamma, 1e-5))


def test_swiglu(operators: ModuleType, random: torch.Generator) -> None:
    x = torch.randn(4, 6, generator=random)
    expected = x[:, :3] * torch.sigmoid(x[:, :3]) * x[:, 3:]
    torch.testing.assert_close(operators.npu_swiglu(x), expected)


def test_rotary_embedding_turns_each_pair_of_the_halves_by_its_angle(
    operators: ModuleType, random: torch.Generator
) -> None:
    x, angles = torch.randn(5, 4, generator=random), torch.randn(5, 2, generator=random)
    turned = torch.complex(x[:, :2], x[:, 2:]) * torch.polar(torch.ones_like(angles), angles)
    both = torch.cat((angles, angles), dim=-1)
    result = operators.npu_rotary_mul(x, both.cos(), both.sin())
    torch.testing.assert_close(result, torch.cat((turned.real, turned.imag), dim=-1))


def test_attention_is_causal_and_scaled(operators: ModuleType, random: torch.Generator) -> None:
    sequence, batch, heads, head = 6, 2, 2, 4
    query, key, value = (torch.randn(sequence, batch, heads * head, generator=random) for _ in range(3))
    mask = torch.ones(sequence, sequence, dtype=torch.bool).triu(1)
    (result,) = operators.npu_fusion_attention(query, key, value, heads, "SBH", atten_mask=mask, scale=0.5)
    q, k, v = (one.view(sequence, batch, heads, head) for one in (query, key, value))
    scores = torch.einsum("sbhd,tbhd->bhst", q, k).mul(0.5).masked_fill(mask, float("-inf"))
    expected = torch.einsum("bhst,tbhd->sbhd", scores.softmax(-1), v).reshape(sequence, batch, heads * head)
    torch.testing.assert_close(result, expected)


def test_what_has_no_stand_in_is_refused(operators: ModuleType) -> None:
    x = torch.zeros(1, 1, 4)
    with pytest.raises(NotImplementedError, match="BSND"):
        operators.npu_fusion_attention(x, x, x, 1, "BSND")
