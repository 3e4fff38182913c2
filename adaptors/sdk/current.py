"""The processor that the functions of the SDK work on: one per process, made when first asked for."""

from __future__ import annotations

from mindio_tft_patch.adaptors.sdk.processor import Processor


class _Process:
    processor: Processor | None = None


def processor() -> Processor:
    """The processor of this process."""
    if _Process.processor is None:
        _Process.processor = Processor()
    return _Process.processor


def replace(new: Processor | None) -> None:
    """Put another one in its place; None: a new one when it is asked for next."""
    _Process.processor = new
