"""A digest of a rank's state that its replica partner must have as well, bit by bit.

Integer arithmetic that wraps around does not depend on the order of summation, so the digest is the same on every
device and for every split of the work. Each 64-bit word is multiplied by an odd number that depends on its place: any
single difference changes the sum, as does an exchange of two words.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

_WORD_BYTES = 8
_CHUNK_WORDS = 2**20
_CHUNK_FACTOR = 0x100000001B3  # odd
_FACTOR = 0x9E3779B97F4A7C15 - 2**64  # odd; 2**64 / golden ratio, as a signed number


def digest_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Digest of named tensors: 16 hexadecimal digits."""
    total = hashlib.sha256()
    for name, tensor in tensors:
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {_sum(tensor)}\n".encode())
    return total.hexdigest()[:16]


def _sum(tensor: torch.Tensor) -> int:
    content = tensor.detach().contiguous().view(-1).view(torch.uint8)
    rest = content.numel() % _WORD_BYTES
    words = content[: content.numel() - rest].view(torch.int64)
    factors = _factors(min(words.numel(), _CHUNK_WORDS), content.device)
    total = 0
    for start in range(0, words.numel(), _CHUNK_WORDS):
        chunk = words[start : start + _CHUNK_WORDS]
        total = total * _CHUNK_FACTOR + int((chunk * factors[: chunk.numel()]).sum().item())
    for byte in content[content.numel() - rest :].tolist():
        total = total * _CHUNK_FACTOR + byte
    return total % 2**64


def _factors(number: int, device: torch.device) -> torch.Tensor:
    """Odd numbers, one for each place: [number] int64."""
    places = torch.arange(number, dtype=torch.int64, device=device)
    return places.mul_(_FACTOR).bitwise_or_(1)
