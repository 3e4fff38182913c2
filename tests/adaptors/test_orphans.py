"""Ranks of a launcher that is killed do not stay behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil

LAUNCHER = """
import subprocess, sys, time
rank = "from mindio_tft_patch.adaptors.orphans import die_with_parent; die_with_parent(); print('up', flush=True); import time; time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", rank], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""  # noqa: E501


def test_a_rank_dies_with_a_launcher_that_is_killed() -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    rank = psutil.Process(int(launcher.stdout.readline()))
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    deadline = time.monotonic() + 20
    while rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE
    launcher.stdout.close()
