"""A rank of a job whose controller is a cluster manager's finds it by address, with the keys of a file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.wire import fast_config, free_port

from mindio_tft_patch.controller.server import ControllerServer
from mindio_tft_patch.protocol.keys import new_keys, read_keys, write_keys

RANK = """
import os
from mindio_tft_patch.adaptors.porting.protection import Protection
from mindio_tft_patch.config import read_config
from mindio_tft_patch.testing import FakeHandlers
protection = Protection(read_config(["--enable-high-availability"], os.environ))
protection.start(FakeHandlers())
print("returning:", protection.returning)
protection.finish()
"""


def test_the_rank_starts_no_controller_and_finds_that_of_the_cluster(tmp_path: Path) -> None:
    write_keys(tmp_path / "keys.json", new_keys())
    server = ControllerServer(fast_config(), 1, keys=read_keys(tmp_path / "keys.json"))
    endpoint = server.start()
    assert endpoint.encrypted
    variables = {
        "MINDX_TASK_ID": "task",
        "PROCESSOR_ADDR": endpoint.address,
        "TTP_PORT": str(endpoint.port),
        "TFT_KEYS": str(tmp_path / "keys.json"),
        "TFT_DEVICE": "cpu",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_PORT": str(free_port()),
        "TTP_LOG_PATH": str(tmp_path / "logs"),
    }
    try:
        ended = subprocess.run(
            [sys.executable, "-c", RANK],
            env={**os.environ, **variables},
            cwd=tmp_path,
            timeout=120,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout == "returning: False\n"
        assert server.registered() == 1
    finally:
        server.close()
