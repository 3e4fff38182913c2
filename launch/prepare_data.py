"""Make a Megatron dataset (.bin and .idx) from text, one token a byte.

    python -m mindio_tft_patch.launch.prepare_data --output data/bytes

The tokens are the bytes 0..255 and 256 for the end of a document, which is what Megatron's NullTokenizer expects:
`--tokenizer-type NullTokenizer --vocab-size 257` from 0.13 on (the last id is the end of document), and
`--vocab-size 256` in core_v0.12 (which adds one id itself). Without --text it takes the English text that comes
with Python: the language reference of `help()` and the documentation strings of the standard library.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

END_OF_DOCUMENT = 256
DEFAULT_MAX_BYTES = 2_000_000
_DOCUMENT_BYTES = 1024  # least size of a document that is cut out of a file
_DOCUMENT_BYTES_MAX = 16 * 1024


class DataError(Exception):
    """The data cannot be prepared; the message says what to change."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="prepare_data", description="Make a byte-level Megatron dataset from text.")
    parser.add_argument("--output", required=True, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx")
    parser.add_argument("--text", nargs="+", type=Path, metavar="FILE", help="text files, cut at empty lines")
    parser.add_argument("--max-bytes", type=int, default=DEFAULT_MAX_BYTES, help="stop after this much (%(default)s)")
    options = parser.parse_args(argv)
    try:
        documents, size = prepare(Path(options.output), options.text, max_bytes=options.max_bytes)
    except (DataError, OSError) as problem:
        print(f"prepare_data: {problem}", file=sys.stderr)
        return 1
    print(f"wrote {options.output}.bin and .idx: {documents} documents, {size} bytes of text")
    return 0


def prepare(
    output: Path, texts: Sequence[Path] | None = None, *, max_bytes: int = DEFAULT_MAX_BYTES
) -> tuple[int, int]:
    """Write the dataset and return the number of documents and of bytes.

    texts: files, cut into documents at empty lines; None takes Python's own documentation.
    Raises DataError for a missing or empty file and where Megatron is not installed, OSError where writing fails.
    """
    if max_bytes <= 0:
        raise DataError(f"--max-bytes is {max_bytes}; it must be positive.")
    documents = _read(texts) if texts else _python_documentation()
    output.parent.mkdir(parents=True, exist_ok=True)
    # A reader must never see half a dataset: write elsewhere in the same folder, then rename.
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as folder:
        unfinished = Path(folder) / output.name
        builder = _builder(f"{unfinished}.bin")
        count, size = 0, 0
        for document in _limited(documents, max_bytes):
            tokens = [*document, END_OF_DOCUMENT]
            builder.add_document(_tensor(tokens), [len(tokens)])
            count, size = count + 1, size + len(document)
        if count == 0:
            raise DataError("There is no text to write: every document is empty.")
        builder.finalize(f"{unfinished}.idx")
        # The index last: Megatron looks for it first.
        for suffix in (".bin", ".idx"):
            os.replace(f"{unfinished}{suffix}", f"{output}{suffix}")
    return count, size


def _read(texts: Iterable[Path]) -> Iterator[bytes]:
    """Yield the documents of each file.

    A dataset of one document cannot be split into training, validation and test data, and Megatron waits for ever for
    the first sample of an empty part.
    """
    for path in texts:
        if not path.is_file():
            raise DataError(f"{path} is not a file; give the path of a text file to --text.")
        content = path.read_bytes()
        if not content.strip():
            raise DataError(f"{path} is empty; leave it out of --text.")
        document = b""
        for paragraph in re.split(rb"(?<=\n)\s*\n", content):
            document = document + b"\n" + paragraph if document else paragraph
            if len(document) >= _DOCUMENT_BYTES:
                yield from _pieces(document)
                document = b""
        if document.strip():
            yield document


def _pieces(text: bytes) -> Iterator[bytes]:
    """Cut a paragraph that has no empty line for very long."""
    for start in range(0, len(text), _DOCUMENT_BYTES_MAX):
        yield text[start : start + _DOCUMENT_BYTES_MAX]


def _python_documentation() -> Iterator[bytes]:
    """Yield the topics of `help()`, then the documentation strings of the standard library, in a fixed order."""
    from pydoc_data.topics import topics

    for _name, text in sorted(topics.items()):
        yield text.encode()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))]
        text = "\n\n".join(filter(None, (ast.get_docstring(node) for node in nodes)))
        if text:
            yield text.encode()


def _limited(documents: Iterable[bytes], max_bytes: int) -> Iterator[bytes]:
    """Yield documents until `max_bytes` are reached; the last one is cut."""
    left = max_bytes
    for document in documents:
        if left <= 0:
            return
        if document:
            yield document[:left]
            left -= len(document)


def _builder(path: str) -> Any:
    """Return Megatron's builder for two-byte tokens (257 ids do not fit into one)."""
    try:
        import numpy
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    except ImportError as problem:
        raise DataError(
            f"Megatron cannot be imported ({problem}); install it with `pip install megatron-core` or put a "
            "Megatron-LM checkout on PYTHONPATH."
        ) from problem
    return IndexedDatasetBuilder(path, dtype=numpy.uint16)


def _tensor(tokens: Sequence[int]) -> Any:
    """Return tokens as the tensor that the builder takes."""
    import torch

    return torch.tensor(tokens, dtype=torch.int64)


if __name__ == "__main__":
    sys.exit(main())
