"""A process that leaves without tear-down leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

PARENT = """
import multiprocessing, os, sys, time

def sleep():
    time.sleep(600)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    manager = context.Manager()
    queue = manager.Queue()
    worker = context.Process(target=sleep, daemon=False)
    worker.start()
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    from mindio_tft_patch.adaptors.helper_processes import end_helper_processes
    if {ending}:
        end_helper_processes()
    os._exit(75)
"""


@pytest.mark.parametrize("ending", [True, False])
def test_writers_and_managers_end_with_a_process_that_leaves_at_once(ending: bool, tmp_path: object) -> None:
    script = f"{tmp_path}/parent.py"
    with open(script, "w") as file:
        file.write(PARENT.replace("{ending}", str(ending)))
    # Not communicate(): what lives on holds the pipe open.
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert parent.wait(60.0) == 75
    assert len(pids) == 2
    children = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    living = psutil.wait_procs(children, timeout=5.0 if ending else 0.5)[1]
    for child in living:
        child.kill()
    # Without it they do live on: this test would notice if there was nothing to end.
    assert bool(living) != ending


def test_a_process_without_children_has_nothing_to_do() -> None:
    from mindio_tft_patch.adaptors.helper_processes import end_helper_processes

    end_helper_processes()
