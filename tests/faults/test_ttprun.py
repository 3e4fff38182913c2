"""The launcher with real processes: torchrun's behaviour without the plugin, patience and a clear end with it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support.launching import TOY_JOB, Launched, free_port, launch

pytestmark = pytest.mark.timeout(300)

FLAG = "--enable-high-availability"
Start = Callable[..., Launched]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts launchers of toy jobs, and checks at the end that nothing of them is left."""
    running: list[Launched] = []
    control_port = str(free_port())

    def begin(options: str, job: str, *, main: str = "ttprun", **environ: str) -> Launched:
        variables = {
            "TTP_LOG_PATH": str(tmp_path / "logs"),
            "TTP_PORT": control_port,
            "TTP_OT": "30",
            "OMP_NUM_THREADS": "1",
            "TFT_COLLECT_SECONDS": "0.1",
            **environ,
        }
        output = tmp_path / f"output_{len(running)}"
        output.touch()
        running.append(launch(main, [*options.split(), TOY_JOB, *job.split()], output, variables))
        return running[-1]

    yield begin
    left = {launched.pid: launched.leftovers() for launched in running if launched.poll() is not None}
    for launched in running:
        launched.kill()
    assert not any(left.values()), f"processes are left over: {left}"


def plugin_job(save: Path, steps: int = 2000, more: str = "") -> str:
    return f"--plugin {FLAG} --steps {steps} --save {save} {more}"


def ready(ranks: int) -> list[str]:
    return [f"rank {rank} ready" for rank in range(ranks)]


# ---------------------------------------------------------------------- without the plugin: torchrun


@pytest.mark.parametrize(
    ("options", "job", "code"),
    [
        ("--standalone --nproc-per-node 2", "--steps 2", 0),
        ("--nproc-per-node 2", "--steps 200 --die 1:2:7", 1),
        ("--standalone --nproc-per-node 2 --max-restarts 1", "--steps 4 --die 1:2:7", 0),
        ("--standalone --nproc-per-node 2", "--steps 200 --die 0:2:SIGKILL", 1),
    ],
    ids=["success", "failure", "success after a restart", "killed"],
)
def test_a_job_without_the_plugin_ends_as_under_torchrun(start: Start, options: str, job: str, code: int) -> None:
    launched = {main: start(options, job, main=main) for main in ("torchrun", "ttprun")}
    assert {main: one.wait() for main, one in launched.items()} == {"torchrun": code, "ttprun": code}
    outputs = {main: sorted(_without_numbers(one.output)) for main, one in launched.items()}
    assert outputs["ttprun"] == outputs["torchrun"]


def _without_numbers(text: str) -> list[str]:
    return [re.sub(r"\d+", "N", line) for line in text.splitlines()]


def test_error_files_and_log_folders_are_torchruns(start: Start, tmp_path: Path) -> None:
    options = f"--standalone --nproc-per-node 1 --log-dir {tmp_path / 'out'} --redirects 3"
    launched = start(options, "--record --die 0:1:raise", TORCHELASTIC_ERROR_FILE=str(tmp_path / "error.json"))
    assert launched.wait() == 1
    assert "the toy job was told to raise" in (tmp_path / "error.json").read_text()
    assert list((tmp_path / "out").glob("*/attempt_0/0/stderr.log"))


def test_the_installed_command_runs_a_job_by_module_and_without_python(tmp_path: Path) -> None:
    ttprun = Path(sys.executable).with_name("ttprun")
    commands = [["-m", "this"], ["--no-python", sys.executable, "-c", "raise SystemExit(3)"]]
    running = [
        subprocess.Popen(
            [ttprun, "--standalone", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for command in commands
    ]
    (zen, _), (failure, _) = (process.communicate(timeout=120) for process in running)
    assert "The Zen of Python" in zen
    assert "exitcode  : 3" in failure
    assert [process.returncode for process in running] == [0, 1]


def test_no_port_is_opened_for_a_job_without_the_plugin(start: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        launched = start("--standalone", "--steps 1", TTP_PORT=str(taken.getsockname()[1]))
        assert launched.wait() == 0


# ---------------------------------------------------------------------- with the plugin


def test_survivors_of_a_killed_rank_save_and_end_and_the_reason_is_the_last_word(start: Start, tmp_path: Path) -> None:
    launched = start("--standalone --nproc-per-node 3", plugin_job(tmp_path, more="--die 1:5:SIGKILL --child"))
    assert launched.wait() == 1
    lines = [line for line in launched.output.splitlines() if line.startswith("ttprun: ")]
    assert lines[0] == "ttprun: the job ended after a fault"
    assert re.fullmatch(r"ttprun: rank 1 \(node 0, pid \d+\) was killed by SIGKILL", lines[1])
    assert "reason: dump after rank 1" in lines[2]
    saved = re.fullmatch(r"ttprun: checkpoint: step (\d+) in (.*)", lines[3])
    assert saved and int(saved[1]) >= 3 and Path(saved[2]).is_dir()
    assert launched.output.endswith(lines[3] + "\n"), "nothing comes after the report, no traceback above all"
    assert "Traceback" not in launched.output


def test_a_fault_before_any_rank_has_registered_ends_at_once_and_says_so_last(start: Start) -> None:
    launched = start("--standalone --nproc-per-node 2", f"{FLAG} --steps 400 --die 1:1:9")
    began = time.monotonic()
    assert launched.wait() == 1
    assert time.monotonic() - began < 25, "nobody could save anything: no patience"
    assert "ttprun: the job ended before training: rank 1 ended with exit code 9" in launched.output
    assert "ChildFailedError" not in launched.output, "what counts must not drown in a traceback"


def test_a_rank_that_ignores_everything_is_ended_after_its_time(start: Start, tmp_path: Path) -> None:
    launched = start("--standalone --nproc-per-node 2", plugin_job(tmp_path, more="--stubborn 0"), TTP_OT="4")
    launched.wait_for(*ready(2))
    os.kill(launched.rank_pids()[1], signal.SIGKILL)
    began = time.monotonic()
    assert launched.wait() == 1
    assert time.monotonic() - began < 4 + 3 + 10
    assert "rank 1 (node 0" in launched.output and "ended by the launcher" in launched.output


def test_a_stopped_rank_that_the_controller_calls_faulty_is_killed(start: Start, tmp_path: Path) -> None:
    environ = {"TFT_HEARTBEAT_SECONDS": "0.2", "TFT_HANG_SECONDS": "3"}
    launched = start("--standalone --nproc-per-node 2", plugin_job(tmp_path), **environ)
    launched.wait_for(*ready(2))
    time.sleep(0.5)
    stopped = launched.rank_pids()[1]
    os.kill(stopped, signal.SIGSTOP)
    launched.wait_for("decision: dump")
    decided = time.monotonic()
    while psutil.pid_exists(stopped) and psutil.Process(stopped).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() - decided < 8, "a faulty rank is killed long before the others' time is over"
        time.sleep(0.02)
    assert launched.wait() == 1
    assert re.search(r"checkpoint: step \d+ in ", launched.output)


@pytest.mark.parametrize("whole_group", [False, True], ids=["launcher only", "ranks too"])
def test_sigterm_saves_before_the_end(start: Start, tmp_path: Path, whole_group: bool) -> None:
    launched = start("--standalone --nproc-per-node 2 --max-restarts 3", plugin_job(tmp_path))
    launched.wait_for(*ready(2))
    time.sleep(1.0)
    targets = [launched.pid, *(launched.rank_pids().values() if whole_group else ())]
    for pid in targets:
        os.kill(pid, signal.SIGTERM)
    assert launched.wait() == 1
    assert "the job ended because the launcher received SIGTERM" in launched.output
    assert "starting all ranks again" not in launched.output, "no restart after a SIGTERM"
    if not whole_group:  # the toy's ranks have no handler: they die of a SIGTERM of their own
        assert re.search(r"checkpoint: step \d+ in ", launched.output)


def test_a_second_signal_ends_at_once(start: Start, tmp_path: Path) -> None:
    launched = start("--standalone --nproc-per-node 2", plugin_job(tmp_path, more="--stubborn 0"), TTP_OT="60")
    launched.wait_for(*ready(2))
    time.sleep(0.7)
    os.kill(launched.pid, signal.SIGTERM)
    launched.wait_for("again: end at once")
    os.kill(launched.pid, signal.SIGINT)
    began = time.monotonic()
    assert launched.wait() == 1
    assert time.monotonic() - began < 15


def test_a_restart_after_the_dump_gets_a_fresh_store_and_a_fresh_controller(start: Start, tmp_path: Path) -> None:
    job = plugin_job(tmp_path, steps=20, more="--gloo --die 0:10:SIGKILL")
    launched = start("--standalone --nproc-per-node 2 --max-restarts 1", job)
    assert launched.wait() == 0
    assert "ttprun: starting all ranks again; 0 restarts are left after this one" in launched.output
    assert "rank 0 done attempt 1" in launched.output and "rank 1 done attempt 1" in launched.output


def test_two_nodes_save_when_all_ranks_of_node_0_have_died(start: Start, tmp_path: Path) -> None:
    port = free_port()
    options = f"--nnodes 2 --nproc-per-node 1 --master-addr 127.0.0.1 --master-port {port} --node-rank"
    nodes = [start(f"{options} {node}", plugin_job(tmp_path, more="--die 0:10:SIGKILL")) for node in (0, 1)]
    assert [node.wait() for node in nodes] == [1, 1]
    for node in nodes:
        assert re.search(r"ttprun: reason: .*rank 0", node.output), node.output
        assert re.search(r"ttprun: checkpoint: step \d+ in ", node.output), node.output
    assert "rank 0 (node 0" in nodes[0].output
    assert "rank 0 (node" not in nodes[1].output


def test_a_port_in_use_is_said_before_any_rank_starts(start: Start, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        launched = start("--standalone --nproc-per-node 2", plugin_job(tmp_path), TTP_PORT=port)
        assert launched.wait() == 1
    assert f"port {port}" in launched.output and "Set TTP_PORT to a free port" in launched.output
    assert "Traceback" not in launched.output and "ready" not in launched.output


def test_an_address_of_another_machine_is_said_before_any_rank_starts(start: Start, tmp_path: Path) -> None:
    launched = start("--standalone --nproc-per-node 2", plugin_job(tmp_path), TTP_ADDR="192.0.2.1")
    assert launched.wait() == 1
    assert "CONTROLLER_ADDR (or TTP_ADDR)" in launched.output
    assert "Traceback" not in launched.output and "ready" not in launched.output


# ---------------------------------------------------------------------- around it


def test_importing_the_plugin_in_the_torchrun_script_lengthens_torchruns_patience() -> None:
    script = """
import sys
sys.argv = ["/usr/bin/torchrun", "train.py"]
import mindio_tft_patch
from torch.distributed.elastic.multiprocessing.api import PContext
class Context(PContext):
    _tail_logs, filtered_stdout, filtered_stderr = (), None, None
    _start = _poll = pids = None
    def __init__(self): ...
    def _close(self, death_sig, timeout): print(death_sig.name, timeout)
Context().close()
Context().close(timeout=500)
"""
    environ = {**os.environ, "TTP_OT": "77"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["SIGTERM", "77.0", "SIGTERM", "500"], done.stderr


def test_an_unknown_elastic_agent_is_refused_with_the_way_out() -> None:
    from mindio_tft_patch.errors import UnsupportedError
    from mindio_tft_patch.launch.ttprun import check_torch

    class Renamed:
        def __init__(self, spec: object, logs_specs: object) -> None: ...

        def run(self) -> None: ...

    with pytest.raises(UnsupportedError, match=r"torch 9\.9.*_monitor_workers.*torchrun"):
        check_torch(Renamed, object(), "9.9")
