"""Puts the plugin into a Megatron process: check the version, apply the table of patches."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from mindio_tft_patch.adaptors.megatron import versions
from mindio_tft_patch.adaptors.megatron.patches import table
from mindio_tft_patch.adaptors.megatron.session import Session
from mindio_tft_patch.config import Config
from mindio_tft_patch.fault_injection import VARIABLE
from mindio_tft_patch.patching import Patch, PatchManager

log = logging.getLogger("mindio_tft_patch.install")

Table = Callable[[Session, Callable[[], None]], list[Patch]]


class Installation:
    """A patched Megatron. One per process, because patches change modules."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.session = Session(config)
        self.manager = PatchManager()

    def apply(self, patches: Table = table) -> None:
        """Patch Megatron.

        Args:
            patches: makes the table; another one where something else has replaced functions of Megatron.

        Raises:
            UnsupportedError: no Megatron that we serve is installed.
            PatchError: a function that we wrap has moved or changed.
            ConfigError: TFT_INJECT makes no sense.
        """
        version = versions.installed()
        self.manager.apply(patches(self.session, self._check_reached), version.core)
        if os.environ.get(VARIABLE):
            # Only now: a job without faults on purpose imports and wraps nothing of it.
            from mindio_tft_patch.adaptors.injection.arm import arm

            arm(self.session, os.environ, version.core)

    def _check_reached(self) -> None:
        """After the first iteration: a mandatory patch that was never called means that protection has a hole."""
        rows = self.manager.rows()
        reached = sum(row.calls > 0 for row in rows)
        # `mindio-tft patches --log` reads it.
        found = [{"point": r.point, "target": r.target, "applied": r.applied, "calls": r.calls} for r in rows]
        log.info("%d of %d patches reached", reached, len(rows), extra={"fields": {"patches": found}})
        for patch in self.manager.unreached():
            log.error("%s was never called in the first iteration; without it: %s is missing", patch.target, patch.why)

    def revert(self) -> None:
        """Put Megatron back as it was."""
        self.manager.revert()
