"""The demonstration as users start it: what it reports, how it ends, and that it can fail."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from html import escape
from pathlib import Path

import psutil
import pytest

from mindio_tft_patch.launch.demo_checkpoints import Part, compare
from mindio_tft_patch.launch.demo_faults import choose, what, when
from mindio_tft_patch.launch.demo_in_place import InPlace
from mindio_tft_patch.launch.demo_job import RANKS, Step
from mindio_tft_patch.launch.demo_report import Findings
from mindio_tft_patch.launch.drill.findings import Comparison, Outcome, Recovery, Report, Run, Verdict
from mindio_tft_patch.launch.drill.page import page

STEPS = 8
DEMO = [sys.executable, "-m", "mindio_tft_patch.launch.demo"]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*DEMO, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=570, check=False
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """One demonstration on a text of its own, and its folder."""
    folder = tmp_path_factory.mktemp("demo")
    text = folder / "my text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog, again and again. " * 400)
    out = folder / "out"
    return _run("--steps", str(STEPS), "--rank", "2", "--text", str(text), "--out", str(out), "--keep"), out


def _fact(output: str, name: str) -> str:
    found = re.search(rf"^ {name} +(.*)$", output, re.MULTILINE)
    assert found, f"{name!r} is not in the report:\n{output}"
    return found[1].strip()


def test_it_ends_well_and_the_report_tells_of_a_kill_a_checkpoint_and_no_lost_step(
    done: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    process, out = done
    output = process.stdout
    assert process.returncode == 0, output
    killed_in = re.search(r"rank 2 \(pid \d+\) got SIGKILL in step (\d+)", output)
    saved = re.search(r"step (\d+), written by the survivors", output)
    assert killed_in and saved
    assert 0 <= int(killed_in[1]) - int(saved[1]) <= 1
    assert _fact(output, "steps lost") == "0"
    assert _fact(output, "resumed") == f"at step {int(saved[1]) + 1}, by the same command"
    assert 0 < float(_fact(output, "kill to checkpoint").split()[0]) < 60
    assert (out / f"checkpoints/iter_{int(saved[1]):07d}").is_dir()
    assert (out / "checkpoints/latest_checkpointed_iteration.txt").read_text() == str(STEPS)


def test_three_faults_of_one_run_are_repaired_in_place_and_told_in_plain_words(
    done: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    output = done[0].stdout
    assert "on purpose: rank 2 loses its process (SIGKILL)" in output
    assert re.search(r"^ rank 2 loses its process \(SIGKILL\) +respawn: +\d+ +\d+\.\d\d +0 *$", output, re.MULTILINE)
    for words in (r"rank [013] has a memory error in its optimizer", r"rank [013] loses all its connections"):
        assert re.search(rf"on purpose: {words}", output)
        assert re.search(rf"^ {words} +retry: +\d+ +\d+\.\d\d +0 *$", output, re.MULTILINE)
    assert f"{STEPS} of {STEPS} lines of its training log equal those of the unbroken run" in output


def test_the_repaired_job_has_logged_its_recoveries_and_saved_nothing_on_the_way(
    done: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    folder = done[1] / "in_place"
    lines = [json.loads(line) for log in (folder / "logs").glob("*.jsonl.*") for line in log.open()]
    records = sorted((one for one in lines if one.get("record") == "recovery"), key=lambda one: float(one["time"]))
    assert [record["strategy"] for record in records] == ["respawn", "retry", "retry"]
    assert [path.name for path in (folder / "checkpoints").glob("iter_*")] == [f"iter_{STEPS:07d}"]


def test_the_repairs_are_told_on_a_web_page(done: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    process, out = done
    assert f"The three repairs as a web page: {out / 'report.html'}" in process.stdout
    page = (out / "report.html").read_text()
    assert "Every fault was dealt with as documented." in page and page.count("repaired in place</td>") == 3


def test_every_part_of_the_final_checkpoints_is_compared_and_equal(
    done: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    output = done[0].stdout
    for part in ("weights", "optimizer: main parameters", "optimizer: exp_avg", "optimizer: exp_avg_sq"):
        number, *verdicts = _fact(output, part).split()
        assert int(number.replace(",", "")) > 100_000 and verdicts == ["equal", "equal"]
    for part in ("optimizer: step, learning rate, groups", "random generator states", "scheduler, samples, iteration"):
        assert re.search(r"equal +equal$", _fact(output, part))


def test_phases_of_the_recovery_are_shown_in_order(done: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    shown = re.findall(r"s\] (stop|clean|rebuild|repair|rollback|resume|dump): done", done[0].stdout)
    in_place = ["stop", "clean", "rebuild", "repair", "rollback", "resume"]
    assert shown == [*in_place * 3, "stop", "clean", "dump"]


def test_the_killed_job_has_logged_the_record_of_its_recovery(
    done: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    lines = [json.loads(line) for log in (done[1] / "killed/logs").glob("*.jsonl.*") for line in log.open()]
    records = [line for line in lines if line.get("record") == "recovery"]
    assert [record["strategy"] for record in records] == ["dump"]
    assert records[0]["ranks"] == [2]


def test_checkpoints_of_two_steps_are_not_called_equal(done: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    folder = done[1] / "checkpoints"
    saved, last = sorted(folder.glob("iter_*"))
    different = {part.name for part in compare(saved, last) if part.different}
    assert {"weights", "optimizer: main parameters", "optimizer: exp_avg", "optimizer: exp_avg_sq"} <= different
    assert {"random generator states", "scheduler, samples, iteration"} <= different


_CURVE = {number: Step(number, f"{6 - number / 10:.6E}", 0.1) for number in range(1, 9)}
_FAULTS = choose(40, 2, random.Random(1))
_RECOVERY = Recovery(10.0, 11.0, "retry", 5, 0, 1, {"stop": 0.1}, "", "")
_REPORT = Report(
    command="",
    schedule="",
    ranks=RANKS,
    runs=(Run(0.0, 20.0, 0),),
    outcomes=tuple(Outcome(number, fault, Verdict.IN_PLACE, 9.9, _RECOVERY) for number, fault in enumerate(_FAULTS)),
    recoveries=(_RECOVERY,),
    comparison=Comparison(equal=8),
)
_PARTS = [Part("weights", 10, ())]
_GOOD = Findings(
    in_place=InPlace(_REPORT, _PARTS),
    repaired=_CURVE,
    killed=(2, 1234),
    after=(4, 0.1),
    saved_step=4,
    resumed_at=5,
    lost=0,
    checkpoint_seconds=1.0,
    phase_seconds={"dump": 0.5},
    unbroken=_CURVE,
    broken=_CURVE,
    parts=_PARTS,
)


def _in_place(**change: object) -> dict[str, object]:
    return {"in_place": InPlace(replace(_REPORT, **change), _PARTS)}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"lost": 1}, "1 completed step(s) were lost"),
        ({"saved_step": 3, "resumed_at": 4}, "1 completed step(s) were lost"),
        ({"resumed_at": 1}, "training resumed at step 1"),
        ({"broken": {**_CURVE, 6: Step(6, "1.0", 0.1)}}, "the loss of step 6 differs"),
        ({"broken": {number: _CURVE[number] for number in (1, 2, 3, 4, 5, 7, 8)}}, "in one training log only"),
        ({"parts": [Part("weights", 10, ("embedding: other values",))]}, "weights differ: embedding"),
        ({"parts": [Part("weights", 0, ())]}, "weights was not in the checkpoints"),
        (
            {"in_place": InPlace(_REPORT, [Part("weights", 10, ("embedding: other values",))])},
            "repairs, weights differ",
        ),
        (_in_place(comparison=Comparison(equal=7, different=(8,))), "the training log of step 8 differs"),
        (_in_place(recoveries=(replace(_RECOVERY, recomputed_steps=2),)), "2 completed step(s) were computed again"),
        (_in_place(outcomes=(Outcome(0, _FAULTS[0], Verdict.SAVED, 9.9),)), "saved by a dump, not repaired in place"),
        (_in_place(outcomes=(Outcome(0, _FAULTS[0], Verdict.NOT_REACHED),)), "fault 1 has not happened"),
    ],
)
def test_whatever_is_not_as_promised_is_a_problem(change: dict[str, object], problem: str) -> None:
    assert not _GOOD.problems()
    found = replace(_GOOD, **change).problems()  # type: ignore[arg-type]
    assert any(problem in line for line in found), found


def test_the_page_tells_of_the_checkpoints_and_of_the_second_training() -> None:
    first, second = _GOOD.words()
    assert first == ("The final checkpoint equals, bit for bit in all 10 values, that of a training without faults.")
    assert "lost rank 2 in step 5: the others wrote a checkpoint of step 4" in second and "DIFFERS" not in second
    other = replace(_GOOD, parts=[Part("weights", 10, ("embedding: other values",)), Part("moments", 5, ())])
    assert "Its final checkpoint DIFFERS in weights from that" in other.words()[1]
    assert all(escape(sentence) in page(replace(_REPORT, more=tuple(other.words()))) for sentence in other.words())


def test_a_step_that_was_saved_but_not_printed_is_no_problem() -> None:
    without = {number: step for number, step in _CURVE.items() if number != 5}
    assert not replace(_GOOD, saved_step=5, resumed_at=6, broken=without).problems()


@pytest.mark.parametrize("steps", [8, 40, 1000])
def test_the_faults_are_of_three_kinds_on_three_ranks_apart_from_each_other(steps: int) -> None:
    for seed in range(20):
        faults = choose(steps, 2, random.Random(seed))
        assert [fault.kind for fault in faults] == ["sigkill", "memory_moments", "broken_sockets"]
        assert faults[0].rank == 2 and len({fault.rank for fault in faults}) == 3
        places = [0, *(fault.step for fault in faults), steps]
        assert all(later - earlier >= 2 for earlier, later in itertools.pairwise(places))
        assert all("step" in when(fault) and str(fault.rank) in what(fault) for fault in faults)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--steps", "2"), "use at least"),
        (("--rank", "4"), "use 0 to 3"),
        (("--text", "/nowhere/text.txt"), "is not a file"),
    ],
)
def test_wrong_use_is_refused_with_what_to_change(arguments: tuple[str, str], message: str, tmp_path: Path) -> None:
    process = _run("--out", str(tmp_path / "out"), *arguments)
    assert process.returncode in (1, 2)
    assert message in process.stdout and "Traceback" not in process.stdout


def test_a_folder_that_is_not_its_own_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    process = _run("--out", str(tmp_path))
    assert process.returncode == 1
    assert "give another folder with --out" in process.stdout
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_every_process(number: signal.Signals, tmp_path: Path) -> None:
    # A shell that starts tests in the background has them ignore interrupts, and their children with them.
    command = ["env", "--default-signal", *DEMO, "--out", str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as demo:
        family: dict[int, psutil.Process] = {}
        deadline = time.monotonic() + 120
        while len(family) < 5 and time.monotonic() < deadline:  # the launcher and four ranks
            family = {child.pid: child for child in psutil.Process(demo.pid).children(recursive=True)}
            time.sleep(0.1)
        assert len(family) >= 5, "the job did not start"
        os.kill(demo.pid, number)
        output, _ = demo.communicate(timeout=90)
    assert demo.returncode == 130, output
    assert not psutil.wait_procs(list(family.values()), timeout=5)[1]
