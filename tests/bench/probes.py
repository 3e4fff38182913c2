"""Clocks inside the commit gate of a rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from mindio_tft_patch.adaptors.megatron.gate import CommitGate


class GateProbe:
    """Seconds of each pass of the gate, without the local update and without waiting for stragglers.

    All ranks meet in a barrier of the probe's own right before; what follows is barrier, marks and record.
    """

    def __init__(self, gate: CommitGate) -> None:
        self._gate: Any = gate
        self._pass = gate._pass
        self._barrier = gate._barrier
        self.passes: list[float] = []
        self.marks: list[float] = []  # without the barrier

    def turn(self, on: bool) -> None:
        """Put the probe in or take it out; makes earlier samples go."""
        self.passes, self.marks = [], []
        self._gate._pass = self._timed if on else self._pass

    def _timed(self, update: Callable[[], Any]) -> Any:
        elsewhere: list[float] = []

        def timed(call: Callable[[], Any]) -> Callable[[], Any]:
            def run() -> Any:
                began = time.perf_counter()
                try:
                    return call()
                finally:
                    elsewhere.append(time.perf_counter() - began)

            return run

        self._gate._barrier = timed(self._barrier)
        dist.barrier()
        began = time.perf_counter()
        result = self._pass(timed(update))
        seconds = time.perf_counter() - began
        self._gate._barrier = self._barrier
        barrier, in_update = elsewhere
        self.passes.append(seconds - in_update)
        self.marks.append(seconds - in_update - barrier)
        return result
