"""`mindio-tft` as users run it: the real command, the real parsers of torchrun and Megatron, no job started."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.launching import free_port
from support.tiny_gpt import tiny_gpt_args

pytestmark = pytest.mark.timeout(240)

FLAG = "--enable-high-availability"
SCRIPT = str(Path(__file__).parents[2] / "launch" / "pretrain_gpt.py")


def mindio_tft(*words: str, folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TTP_", "TFT_"))}
    command = Path(sys.executable).with_name("mindio-tft")
    path = os.pathsep.join([str(command.parent), kept.get("PATH", "")])
    variables = {**kept, "PATH": path, "OMP_NUM_THREADS": "1", "TTP_PORT": str(free_port()), **environ}
    return subprocess.run(
        [command, *words], capture_output=True, text=True, timeout=200, cwd=folder, env=variables, check=False
    )


@dataclass(frozen=True)
class Examined:
    """What the doctor said about a command."""

    code: int
    report: dict[str, Any]

    def about(self, area: str, level: str) -> list[str]:
        return [
            f"{finding['message']} {finding['change']}"
            for finding in self.report["findings"]
            if (finding["area"], finding["level"]) == (area, level)
        ]


def examined(done: subprocess.CompletedProcess[str]) -> Examined:
    assert done.stdout, done.stderr
    return Examined(done.returncode, json.loads(done.stdout))


def test_a_good_command_has_no_errors_and_starts_nothing(tmp_path: Path) -> None:
    arguments = tiny_gpt_args(data_prefix=None, tp=2, save="save", load="save")
    command = ["ttprun", "--standalone", "--nproc-per-node", "4", SCRIPT, *arguments, FLAG]
    found = examined(mindio_tft("doctor", "--json", "--", *command, folder=tmp_path))
    assert found.code == 0
    assert (found.report["errors"], found.report["warnings"]) == (0, 0), found.report["findings"]
    assert found.report["launch"]["world_size"] == 4
    assert "TP 2 x PP 1 x CP 1 x DP 2; each optimizer shard on 2 rank(s), the first on 0, 2" in str(
        found.about("topology", "ok")
    )
    saved = {fault["fault"]: fault["saved"] for fault in found.report["faults"]}
    assert saved["death of one process"] and saved["death of rank 0"] and not saved["loss of the node"]
    assert list(tmp_path.iterdir()) == [], "no folder is made"


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Examined]:
    """A command with something wrong in every area."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "train.py").write_text("import megatron\n")
    (folder / "save" / "iter_0000005").mkdir(parents=True)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        arguments = tiny_gpt_args(data_prefix="no/such/data", tp=4, save="save", extra=["--save-intervall", "5"])
        faults = "rank=1,step=5,moment=forward,kind=sigkil"
        command = ["torchrun", "--nproc-per-node", "4", "--nnodes", "1:2", "train.py", *arguments, FLAG]
        assignments = ["TTP_OT=0", "TTP_PROT=9000"]
        variables = {"TTP_PORT": port, "TFT_INJECT": faults}
        yield examined(mindio_tft("doctor", "--json", "--", *assignments, *command, folder=folder, **variables))


@pytest.mark.parametrize(
    ("area", "level", "words"),
    [
        ("flags", "error", ["data-parallel size", "is 1", "--tensor-model-parallel-size"]),
        ("flags", "warning", ["--save-intervall", "Did you mean --save-interval?"]),
        ("network", "error", ["in use", "TTP_PORT"]),
        ("save", "error", ["START FROM ITERATION 0", "latest_checkpointed_iteration.txt"]),
        ("save", "warning", ["--load is not given", "Add --load save"]),
        ("data", "error", ["no/such/data.bin", "--data-path"]),
        ("variables", "warning", ["TTP_OT='0'", "Change or unset TTP_OT"]),
        ("variables", "error", ["TFT_INJECT", "unknown moment or kind", "unset TFT_INJECT"]),
        ("variables", "warning", ["TTP_PROT", "Did you mean TTP_PORT?"]),
        ("command", "warning", ["controller lives in rank 0", "ttprun"]),
        ("command", "warning", ["1 to 2 nodes", "--nnodes"]),
        ("command", "error", ["train.py does not import mindio_tft_patch", "nothing is protected", "first import"]),
    ],
)
def test_what_is_wrong_is_named_with_what_to_change(bad: Examined, area: str, level: str, words: list[str]) -> None:
    assert bad.code == 1
    said = bad.about(area, level)
    assert any(all(word in line for word in words) for line in said), said


def test_a_command_that_cannot_start_foresees_no_recovery(bad: Examined) -> None:
    assert bad.report["faults"] == []


def test_flags_that_the_import_would_refuse_are_reported_not_raised(tmp_path: Path) -> None:
    command = ["ttprun", "--nproc-per-node", "two", "--standalone", SCRIPT, "--enable-worker-reboot"]
    done = mindio_tft("doctor", "--", *command, folder=tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr + done.stdout
    assert "Add --enable-high-availability" in done.stdout
    assert "nproc" in done.stdout


def test_one_mistyped_option_is_one_error(tmp_path: Path) -> None:
    arguments = tiny_gpt_args(data_prefix="no/such/data", tp=2, save="save")
    command = ["ttprun", "--nproc_per_noed", "4", SCRIPT, *arguments, FLAG, "--enable-worker-reboot"]
    found = examined(mindio_tft("doctor", "--json", "--", *command, folder=tmp_path))
    (wrong,) = [finding for finding in found.report["findings"] if finding["level"] == "error"]
    assert "--nproc_per_noed; did you mean --nproc-per-node?" in wrong["message"]
    (open_,) = [finding for finding in found.report["findings"] if finding["level"] == "warning"]
    assert open_["message"].startswith("Not examined") and found.report["faults"] == []


def test_errors_outside_of_the_arguments_leave_the_table_under_a_condition(tmp_path: Path) -> None:
    arguments = tiny_gpt_args(data_prefix="no/such/data", tp=2, save="save", load="save")
    flags = [FLAG, "--enable-worker-reboot", "--dataloader-type", "external"]
    command = ["ttprun", "--standalone", "--nproc-per-node", "4", SCRIPT, *arguments, *flags]
    done = mindio_tft("doctor", "--", *command, folder=tmp_path)
    assert done.returncode == 1 and "no/such/data.bin is not there" in done.stdout
    assert "What a fault will lead to, once the errors are corrected" in done.stdout
    table = done.stdout.partition("What a fault will lead to")[2]
    assert "with --dataloader-type external no process is started anew" in table
    assert "--enable-worker-reboot" not in table and "started anew, the others wait" not in table


def test_the_command_in_a_shell_script_is_examined_where_the_script_calls_it(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    arguments = shlex.join([*tiny_gpt_args(data_prefix=None, tp=2, save="save", load="save"), FLAG])
    call = f"ttprun --standalone --nproc-per-node 4 {SCRIPT} {arguments}"
    (tmp_path / "train.sh").write_text(f"cd job\necho prepared\nexport TTP_OT=0\nexec {call}\n")
    found = examined(mindio_tft("doctor", "--json", "--script", "--", "sh", "train.sh", folder=tmp_path))
    assert (found.code, found.report["errors"], found.report["launch"]["world_size"]) == (0, 0, 4)
    assert any("TTP_OT='0'" in line for line in found.about("variables", "warning"))
    assert list((tmp_path / "job").iterdir()) == []


def test_wrong_use_is_told_from_a_bad_job(tmp_path: Path) -> None:
    done = mindio_tft("doctor", "ttprun", "x.py", folder=tmp_path)
    assert done.returncode == 2
    missing = mindio_tft("doctor", folder=tmp_path)
    assert missing.returncode == 2 and "mindio-tft doctor -- ttprun" in missing.stderr
    script = mindio_tft("doctor", "--", "bash", "train.sh", folder=tmp_path)
    assert script.returncode == 1 and "mindio-tft doctor --script -- bash train.sh" in script.stdout


def test_every_patch_fits_and_what_a_process_reached_is_shown(tmp_path: Path) -> None:
    # What a job does before its second iteration, without the iteration: so no patch was called.
    job = (
        "import os; from mindio_tft_patch import logs; from mindio_tft_patch.config import read_config;"
        "from mindio_tft_patch.adaptors.megatron.install import Installation;"
        "config = read_config(['--enable-high-availability'], os.environ); logs.configure(config);"
        "made = Installation(config); made.apply(); made._check_reached()"
    )
    environ = {**os.environ, "TTP_LOG_PATH": str(tmp_path / "logs"), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", job], env=environ, timeout=200, check=True, capture_output=True)
    done = mindio_tft("patches", "--json", "--log", "logs", folder=tmp_path)
    report = json.loads(done.stdout)
    rows = report["patches"]
    assert done.returncode == 1 and not report["holds"], "mandatory patches that were never reached are holes"
    assert {row["calls"] for row in rows} == {0}
    assert all(row["found"] and row["parameters_ok"] and row["applied"] for row in rows if row["needed"])
    assert {row["point"] for row in rows} | set(map(int, report["without_patch"])) == set(range(1, 13))


def test_a_megatron_without_our_targets_is_refused_with_the_way_out(tmp_path: Path) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (tmp_path / "megatron" / "training").mkdir()
    for folder in (core, core.parent, core.parent / "training"):
        (folder / "__init__.py").touch()
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 18\nPATCH = 0\nPRE_RELEASE = ''\n")
    done = mindio_tft("patches", folder=tmp_path, MEGATRON_LM_PATH=str(tmp_path))
    assert done.returncode == 1, done.stderr
    assert "megatron-core 0.18.0" in done.stdout
    assert "megatron.training.training:train_step" in done.stdout and "MISSING" in done.stdout
    assert "Use a supported Megatron" in done.stdout
