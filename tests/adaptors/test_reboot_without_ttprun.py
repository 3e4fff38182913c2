"""--enable-worker-reboot under a launcher that cannot start a single rank: rank 0 says so before training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mindio_tft_patch import logs
from mindio_tft_patch.adaptors.porting import protection as module
from mindio_tft_patch.adaptors.porting.protection import Protection
from mindio_tft_patch.config import Config

TORCHRUN = Config(high_availability=True, worker_reboot=True, device="cpu")


class _FarEnoughError(Exception):
    pass


def _far_enough(config: Config) -> None:
    raise _FarEnoughError


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, True),
        ({"rank": 1}, False),
        ({"worker_reboot": False}, False),
        ({"controller_external": True, "started_by_ttprun": True}, False),
        ({"controller_external": True}, False),  # the cluster manager starts ranks
    ],
)
def test_it_is_said_once_and_only_where_it_is_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], says: bool
) -> None:
    monkeypatch.setattr(module, "open_job_store", _far_enough)
    protection = Protection(replace(TORCHRUN, log_path=tmp_path / "logs", **changes))
    handlers: Any = object()
    try:
        with pytest.raises(_FarEnoughError):
            protection.start(handlers)
    finally:
        logs.reset()
    written = "".join(file.read_text() for file in (tmp_path / "logs").rglob("*.log*"))
    assert written.count("Start the job with ttprun") == (1 if says else 0), written
    assert ("--enable-worker-reboot: nobody starts a lost process anew" in written) is says
