"""The launcher replaces lost ranks while the others live: real processes of the toy job, the real controller."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support.launching import TOY_JOB, Launched, free_port, launch

pytestmark = pytest.mark.timeout(200)

Start = Callable[..., Launched]
FLAGS = "--plugin --enable-high-availability --enable-worker-reboot"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts launchers of toy jobs, and checks at the end that nothing of them is left."""
    running: list[Launched] = []
    port = str(free_port())

    def begin(options: str = "", job: str = "", *, steps: int = 40, **environ: str) -> Launched:
        variables = {
            "TTP_LOG_PATH": str(tmp_path / "logs"),
            "TTP_PORT": port,
            "TTP_OT": "30",
            "TTP_RETRY_TIMES": "60",
            "OMP_NUM_THREADS": "1",
            "TFT_COLLECT_SECONDS": "0.1",
            "TFT_RETURN_SECONDS": "60",
            **environ,
        }
        words = (
            f"{options or '--standalone --nproc-per-node 3'} {TOY_JOB} {FLAGS} --steps {steps} --save {tmp_path} {job}"
        )
        output = tmp_path / f"output_{len(running)}"
        output.touch()
        running.append(launch("ttprun", words.split(), output, variables))
        return running[-1]

    yield begin
    left = {launched.pid: launched.leftovers() for launched in running if launched.poll() is not None}
    for launched in running:
        launched.kill()
    assert not any(left.values()), f"processes are left over: {left}"


def pids_of(launched: Launched, rank: int) -> list[int]:
    """Processes that have been this rank, in order."""
    return [int(pid) for pid in re.findall(rf"^rank {rank} is process (\d+)$", launched.output, re.MULTILINE)]


def wait_for(condition: Callable[[], object], launched: Launched, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert launched.poll() is None, launched.output
        assert time.monotonic() < deadline, launched.output
        time.sleep(0.02)


def succeeded(launched: Launched, ranks: int = 3, recoveries: str = "") -> None:
    assert launched.wait() == 0, launched.output
    for rank in range(ranks):
        assert f"rank {rank} done attempt 0" in launched.output
    if recoveries:
        assert f"ttprun: recoveries in place: {recoveries}" in launched.output, launched.output


def steps_of(launched: Launched, rank: int) -> list[int]:
    return [int(step) for step in re.findall(rf"^rank {rank} step (\d+)$", launched.output, re.MULTILINE)]


# ---------------------------------------------------------------------- one rank and several


@pytest.mark.parametrize(
    "how", ["SIGKILL", pytest.param("SIGSEGV", marks=pytest.mark.nightly), pytest.param("3", marks=pytest.mark.nightly)]
)
def test_only_the_dead_rank_is_started_again_and_the_job_goes_on(start: Start, how: str) -> None:
    launched = start(job=f"--die 1:5:{how}")
    succeeded(launched, recoveries="1 (respawn 1)")
    assert [len(pids_of(launched, rank)) for rank in range(3)] == [1, 2, 1]
    assert steps_of(launched, 0) == list(range(1, 41)), "every step once"
    assert "rank 1 returns" in launched.output
    assert "the job ended" not in launched.output and "Traceback" not in launched.output


def test_rank_0_is_a_rank_like_others(start: Start) -> None:
    launched = start(job="--die 0:5:SIGKILL")
    succeeded(launched, recoveries="1 (respawn 1)")
    assert [len(pids_of(launched, rank)) for rank in range(3)] == [2, 1, 1]


@pytest.mark.nightly
def test_a_stopped_rank_is_killed_and_started_again(start: Start) -> None:
    launched = start(job="--die 1:5:SIGSTOP", TFT_HEARTBEAT_SECONDS="0.2", TFT_HANG_SECONDS="3")
    succeeded(launched, recoveries="1 (respawn 1)")
    old, new = pids_of(launched, 1)
    assert old != new and not psutil.pid_exists(old)


@pytest.mark.nightly
def test_the_same_rank_twice_in_a_row(start: Start) -> None:
    launched = start(job="--die 1:5:SIGKILL,1:9:3")
    succeeded(launched, recoveries="2 (respawn 2)")
    assert len(pids_of(launched, 1)) == 3


@pytest.mark.nightly
def test_two_ranks_at_once(start: Start) -> None:
    launched = start(job="--die 1:5:SIGKILL,2:5:SIGKILL")
    succeeded(launched)
    assert [len(pids_of(launched, rank)) for rank in range(3)] == [1, 2, 2]


def test_a_replacement_that_is_killed_on_its_way_back_is_replaced(start: Start) -> None:
    launched = start(job="--die 1:5:SIGKILL")
    wait_for(lambda: "takes the place of" in launched.output, launched)
    found = re.search(r"process (\d+) takes the place of", launched.output)
    assert found is not None
    os.kill(int(found[1]), signal.SIGKILL)
    succeeded(launched, recoveries="1 (respawn 1)")
    assert launched.output.count("takes the place of") == 2


def test_what_a_dead_rank_left_running_is_ended(start: Start) -> None:
    launched = start(job="--child --die 1:20:SIGKILL", steps=2000)
    launched.wait_for("rank 1 returns")
    old = pids_of(launched, 1)[0]
    children = [int(pid) for pid in re.findall(r"^child (\d+)$", launched.output, re.MULTILINE)]
    assert len(children) == 4

    def group(pid: int) -> int:
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                return os.getpgid(pid)
        return 0

    wait_for(lambda: old not in map(group, children), launched, 5.0)
    assert sum(1 for pid in children if psutil.pid_exists(pid)) >= 3, "those of the others live"
    os.kill(launched.pid, signal.SIGTERM)  # what ranks leave behind that end in good order is torchrun's business
    assert launched.wait() == 1


def test_log_files_are_appended_to_and_still_shown(start: Start, tmp_path: Path) -> None:
    options = f"--standalone --nproc-per-node 2 --log-dir {tmp_path / 'out'} --redirects 3 --tee 1"
    launched = start(options, "--die 1:5:SIGKILL")
    assert launched.wait() == 0, launched.output
    (log,) = (tmp_path / "out").glob("*/attempt_0/1/stdout.log")
    text = log.read_text()
    assert len(re.findall(r"^rank 1 is process", text, re.MULTILINE)) == 2
    assert text.index("rank 1 step 4") < text.index("rank 1 returns") < text.index("rank 1 done")
    assert "[default1]:rank 1 returns" in launched.output


# ---------------------------------------------------------------------- what is not repaired


@pytest.mark.nightly
def test_a_dump_after_a_repair_names_the_last_death_only(start: Start) -> None:
    launched = start(job="--die 1:5:SIGKILL,2:15:raise", TFT_RESTART_BUDGET="1", steps=2000)
    wait_for(lambda: steps_of(launched, 0)[-1:] > [10], launched)
    os.kill(pids_of(launched, 0)[0], signal.SIGKILL)
    assert launched.wait() == 1
    report = [line for line in launched.output.splitlines() if line.startswith("ttprun: ")]
    assert not any("rank 1 (node" in line for line in report), report
    assert "ttprun: recoveries in place: 1 (respawn 1)" in report
    assert any(line.startswith("ttprun: checkpoint: step") for line in report), report


def test_sigterm_while_a_rank_is_on_its_way_back_ends_the_job(start: Start) -> None:
    launched = start(job="--die 1:5:SIGKILL", steps=2000)
    wait_for(lambda: "takes the place of" in launched.output, launched)
    os.kill(launched.pid, signal.SIGTERM)
    assert launched.wait() == 1
    assert "the job ended because the launcher received SIGTERM" in launched.output


def test_a_killed_launcher_takes_everything_with_it(start: Start) -> None:
    launched = start("--standby --standalone --nproc-per-node 2", steps=2000)
    launched.wait_for("rank 0 step 3")
    launched.poll()
    assert len(launched.family) >= 3
    os.kill(launched.pid, signal.SIGKILL)
    launched.wait()
    assert not launched.leftovers(10.0)


# ---------------------------------------------------------------------- stand-bys


def standbys(launched: Launched) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(launched.pid).children():
        with contextlib.suppress(psutil.Error):
            if "mindio_tft_patch.launch.standby" in process.cmdline() and process.pid not in every_rank(launched):
                found.append(process)
    return found


def every_rank(launched: Launched) -> set[int]:
    return {int(pid) for pid in re.findall(r"^rank \d+ is process (\d+)$", launched.output, re.MULTILINE)}


def ready_standby(launched: Launched, logs: Path) -> psutil.Process:
    """The stand-by that waits for its order, as the launcher has seen."""

    def ready() -> list[str]:
        texts = [path.read_text() for path in logs.rglob("*") if path.is_file()]
        return re.findall(r"the stand-by process (\d+) is ready", "\n".join(texts))

    wait_for(ready, launched)
    return psutil.Process(int(ready()[-1]))


def test_a_stand_by_becomes_the_lost_rank_and_is_followed_by_another(start: Start, tmp_path: Path) -> None:
    launched = start("--standby --standalone --nproc-per-node 2", steps=4000)
    launched.wait_for("rank 0 step 3")
    standby = ready_standby(launched, tmp_path / "logs")
    os.kill(pids_of(launched, 1)[0], signal.SIGKILL)
    launched.wait_for("rank 1 returns")
    assert pids_of(launched, 1)[-1] == standby.pid
    assert os.getpgid(standby.pid) == standby.pid
    wait_for(lambda: standbys(launched), launched, 30.0)
    os.kill(launched.pid, signal.SIGTERM)
    assert launched.wait() == 1


def test_without_a_living_stand_by_a_new_process_is_started(start: Start, tmp_path: Path) -> None:
    launched = start("--standby --standalone --nproc-per-node 2", steps=400)
    launched.wait_for("rank 0 step 3")
    standby = ready_standby(launched, tmp_path / "logs")
    os.kill(standby.pid, signal.SIGSTOP)
    os.kill(pids_of(launched, 1)[0], signal.SIGKILL)
    launched.wait_for("rank 1 returns")
    assert "did not take its order" in launched.output
    assert pids_of(launched, 1)[-1] != standby.pid
    assert not psutil.pid_exists(standby.pid)
    succeeded(launched, ranks=2)


@pytest.mark.nightly
def test_standby_without_the_flag_that_needs_it_is_ignored_with_a_word(start: Start, tmp_path: Path) -> None:
    output = tmp_path / "plain"
    output.touch()
    words = ["--standby", "--standalone", TOY_JOB, "--enable-high-availability", "--steps", "1"]
    launched = launch("ttprun", words, output, {"TTP_PORT": str(free_port()), "TTP_LOG_PATH": str(tmp_path / "l")})
    assert launched.wait() == 0
    assert "--standby is ignored" in launched.output
    assert not launched.leftovers()


# ---------------------------------------------------------------------- many times, and whole nodes


@pytest.mark.nightly
def test_ten_recoveries_leave_no_descriptor_zombie_or_thread_behind(start: Start, tmp_path: Path) -> None:
    launched = start(f"--standalone --nproc-per-node 2 --redirects 3 --log-dir {tmp_path / 'out'}", steps=100000)
    launcher = psutil.Process(launched.pid)
    wait_for(lambda: launcher_log(launched).count("is ready at step") >= 2, launched)
    pids = [launched.rank_pids()[rank] for rank in (0, 1)]
    resources = []
    for turn in range(12):
        os.kill(pids[turn % 2], signal.SIGKILL)
        wait_for(lambda expected=turn + 1: launcher_log(launched).count("resume: done") == expected, launched)
        pids[turn % 2] = int(re.findall(r"process (\d+) takes the place of", launched.output)[-1])
        time.sleep(0.3)
        resources.append((launcher.num_fds(), launcher.num_threads(), len(launcher.children())))
    # The files of a first process are kept open by torchelastic, those of its successors are not.
    assert resources[-1] == resources[1] <= resources[0]
    os.kill(launched.pid, signal.SIGTERM)
    assert launched.wait() == 1
    assert "recoveries in place: 12 (respawn 12)" in launched.output


def launcher_log(launched: Launched) -> str:
    folder = launched._output.parent / "logs"
    return "".join(path.read_text() for path in folder.glob(f"ttp_log.log.{launched.pid}"))


@pytest.mark.nightly
def test_a_node_that_is_killed_and_started_again_comes_back_in(start: Start) -> None:
    port = free_port()
    options = f"--nnodes 2 --nproc-per-node 2 --master-addr 127.0.0.1 --master-port {port} --node-rank"
    environ = {"TFT_HEARTBEAT_SECONDS": "0.3"}
    first, second = (start(f"{options} {node}", steps=150, **environ) for node in (0, 1))
    for node in (first, second):
        node.wait_for(f"rank {2 if node is second else 0} step 5")
    os.kill(second.pid, signal.SIGKILL)
    second.wait()
    again = start(f"{options} 1", steps=150, **environ)
    assert again.wait() == 0, again.output
    assert first.wait() == 0, first.output
    assert [len(pids_of(first, rank)) for rank in (0, 1)] == [1, 1]
    assert steps_of(first, 0) == list(range(1, 151))
    assert "rank 2 returns" in again.output and "rank 3 returns" in again.output
    assert [len(pids_of(again, rank)) for rank in (2, 3)] == [1, 1], "started once"
    assert "ttprun: recoveries in place: 1 (respawn 1)" in first.output
