"""Turns everything off that the plugin does in a training step, and on again; the replica layout stays as it is.

Off means: wrappers of points 2, 5, 8 and 11 hand every call on (gate, records, activities, what recovery in place
notes, log state), `Work.wait` is torch's own, and no heartbeat is sent. To be turned between two steps, by all ranks
between the same two.
"""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed as dist

from mindio_tft_patch.adaptors.megatron.install import Installation

# The others act before training, or are the replica layout (3 and 4), which is the same on both sides.
SWITCHED_POINTS = frozenset({2, 5, 8, 11})


class Switch:
    """The plugin of this rank; on at first.

    Args:
        installation: must have been started.
    """

    def __init__(self, installation: Installation) -> None:
        manager, client = installation.manager, installation.session._client
        self._records = [record for record in manager._own if record.patch.point in SWITCHED_POINTS]
        device: Any = installation.session._device
        self._wait: Any = dist.Work.wait
        self._original_wait = device._waits._original
        self._beating = threading.Event()
        self._beating.set()
        assert self._original_wait is not None and client is not None and len(self._records) > 10
        beat: Any = client._beat

        def beat_when_on() -> Any:
            self._beating.wait()
            return beat()

        client._beat = beat_when_on  # type: ignore[method-assign]

    def turn(self, on: bool) -> None:
        """Turn it on or off."""
        for record in self._records:
            record.active = on
        dist.Work.wait = self._wait if on else self._original_wait
        if on:
            self._beating.set()
        else:
            self._beating.clear()

    def calls(self) -> int:
        """How often the plugin has been called so far by what can be turned off."""
        return sum(record.calls for record in self._records)
