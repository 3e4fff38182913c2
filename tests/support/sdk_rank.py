"""One processor of the SDK with a controller in memory."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mindio_tft_patch.adaptors.sdk import current
from mindio_tft_patch.adaptors.sdk.leaving import Leaving
from mindio_tft_patch.adaptors.sdk.processor import Processor
from mindio_tft_patch.adaptors.sdk.rank_thread import NudgingClient
from mindio_tft_patch.protocol.endpoint import Endpoint
from mindio_tft_patch.protocol.messages import Welcome
from mindio_tft_patch.testing import FakeChannel
from support.sdk_job import MemoryStore

PARAMETERS: dict[str, Any] = {
    "rank": 1,
    "world_size": 4,
    "enable_local_copy": False,
    "enable_tls": True,
    "tls": "",
    "enable_uce": True,
    "enable_arf": True,
    "enable_zit": False,
}


class QuietLeaving(Leaving):
    """Ends nothing."""

    def __init__(self) -> None:
        super().__init__(0.0, lambda code: None)


def make_processor(
    channel: FakeChannel | None = None, environ: Mapping[str, str] | None = None, **others: Any
) -> Processor:
    """A processor whose client is connected to `channel`."""
    channel = channel or FakeChannel(Welcome(0, True))
    return Processor(
        {} if environ is None else environ,
        find=lambda *ignored: Endpoint("127.0.0.1", 8000),
        store=lambda ignored: MemoryStore(),
        client=functools.partial(NudgingClient, connect=lambda endpoint: channel),
        leaving=QuietLeaving(),
        log_to=lambda *ignored, **more: None,
        **others,
    )


@contextmanager
def as_current(processor: Processor) -> Iterator[Processor]:
    """The functions of the SDK work on this processor."""
    current.replace(processor)
    try:
        yield processor
    finally:
        current.replace(None)
        processor.close()
