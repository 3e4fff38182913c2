"""A small dataset and a byte tokenizer in the forms that the Megatron-LM of 2023 reads; written without it."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

END_OF_DOCUMENT = "<|endoftext|>"
_UINT16 = 8  # code of the token type in the index file


def write_tokenizer(folder: Path) -> tuple[Path, Path]:
    """Write a vocabulary of the 256 byte symbols of GPT-2 and a merge table without merges."""
    symbols = _byte_symbols()
    vocabulary = {symbol: number for number, symbol in enumerate([*symbols, END_OF_DOCUMENT])}
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    vocab.write_text(json.dumps(vocabulary))
    merges.write_text("#version: 0.2\n\n")
    return vocab, merges


def write_dataset(prefix: Path, documents: Sequence[bytes]) -> None:
    """Write `<prefix>.bin` and `<prefix>.idx`: one token a byte, 256 at the end of each document."""
    tokens = [[*document, 256] for document in documents]
    sizes = np.array([len(one) for one in tokens], dtype=np.int32)
    starts = np.concatenate(([0], np.cumsum(sizes[:-1], dtype=np.int64))) * 2
    prefix.with_suffix(".bin").write_bytes(np.concatenate([np.array(one, dtype=np.uint16) for one in tokens]).tobytes())
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, _UINT16, len(sizes), len(sizes) + 1)
    ends = np.arange(len(sizes) + 1, dtype=np.int64)
    prefix.with_suffix(".idx").write_bytes(
        header + sizes.tobytes() + starts.astype(np.int64).tobytes() + ends.tobytes()
    )


def documents(number: int = 60, size: int = 1500) -> list[bytes]:
    """Text of a fixed kind that a model can learn something from."""
    from pydoc_data.topics import topics

    text = "\n".join(value for _, value in sorted(topics.items())).encode()
    return [text[start : start + size] for start in range(0, number * size, size)]


def _byte_symbols() -> list[str]:
    """GPT-2 writes every byte as a printable character."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(number) if number in printable else chr(next(others)) for number in range(256)]
