"""A training command inside of a shell script: how it calls the launcher is found without starting a rank."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import tomllib

from mindio_tft_patch.adaptors.doctor import examine, shell_script
from mindio_tft_patch.errors import ConfigError

ROOT = Path(__file__).parents[2]
REAL = "#!/bin/sh\ntouch started\n"


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment with launchers that leave a trace when they are really started."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "environment" / "bin"
    folder.mkdir(parents=True)
    for name in ("ttprun", "torchrun"):
        (folder / name).write_text(REAL)
        (folder / name).chmod(0o755)
    kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
    return {**kept, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def script(folder: Path, text: str) -> Path:
    path = folder / "train.sh"
    path.write_text(text)
    path.chmod(0o755)
    return path


def marked_with(folder: Path) -> list[str]:
    """Processes that a script of these tests has left behind."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"MARK={folder}".encode() in (entry / "environ").read_bytes():
                found.append(entry.name)
    return found


def test_words_variables_and_folder_of_the_call_are_recorded(tmp_path: Path, environ: dict[str, str]) -> None:
    (tmp_path / "there").mkdir()
    path = script(
        tmp_path,
        "#!/bin/bash\nexport TTP_PORT=9001\ncd there\nARGS='--save ckpt --lr 1'\n"
        'ttprun --nproc-per-node 4 train.py $ARGS "$1" | tee log\nttprun second.py\n',
    )
    call = shell_script.recorded(["bash", str(path), "two words"], {**environ, "MINE": "1"})
    assert call.words == ("ttprun", "--nproc-per-node", "4", "train.py", "--save", "ckpt", "--lr", "1", "two words")
    assert call.folder == tmp_path / "there"
    assert (call.environ["TTP_PORT"], call.environ["MINE"], call.environ["PATH"]) == ("9001", "1", environ["PATH"])
    assert not [name for name in call.environ if name.startswith("BASH_FUNC_")]
    assert not list(tmp_path.rglob("started"))


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_call_by_exec_is_recorded(tmp_path: Path, environ: dict[str, str], shell: str) -> None:
    path = script(tmp_path, "exec torchrun --standalone train.py\n")
    assert shell_script.recorded([shell, str(path)], environ).words == ("torchrun", "--standalone", "train.py")


def test_a_script_that_activates_an_environment_starts_nothing(tmp_path: Path, environ: dict[str, str]) -> None:
    path = script(tmp_path, f"#!/bin/bash\nexport PATH={tmp_path}/environment/bin:$PATH\nttprun train.py\n")
    assert shell_script.recorded([str(path)], environ).words == ("ttprun", "train.py")
    assert not list(tmp_path.rglob("started"))


def test_a_script_that_calls_no_launcher_is_refused_with_the_way_out(tmp_path: Path, environ: dict[str, str]) -> None:
    path = script(tmp_path, "#!/bin/sh\nexit 3\n")
    with pytest.raises(ConfigError, match=r"exit code was 3.*in front of the command that starts the ranks"):
        shell_script.recorded([str(path)], environ)
    with pytest.raises(ConfigError, match="cannot be run"):
        shell_script.recorded([str(tmp_path / "absent.sh")], environ)
    with pytest.raises(ConfigError, match="has not called ttprun within"):
        shell_script.recorded(["sh", "-c", "sleep 60"], environ, limit_seconds=0.2)


def test_shell_scripts_are_told_from_launchers(tmp_path: Path) -> None:
    shebang, python = tmp_path / "start", tmp_path / "program"
    shebang.write_text("#!/usr/bin/env bash\n")
    python.write_text("#!/usr/bin/env python3\n")
    for words in (["bash", "x"], ["./train.sh"], [str(shebang), "4"]):
        assert shell_script.is_shell_script(words)
    for words in (["ttprun", "a.py"], ["srun", "ttprun", "a.py"], ["python", "a.py"], [str(python)], ["absent"], []):
        assert not shell_script.is_shell_script(words)


def test_without_the_option_the_doctor_runs_nothing_and_says_what_to_do(tmp_path: Path) -> None:
    path = script(tmp_path, f"#!/bin/sh\ntouch {tmp_path}/started\n")
    (found,) = examine.examine(["bash", str(path)], {}).findings
    assert "is a shell script" in found.message
    assert f"mindio-tft doctor --script -- bash {path}" in found.change and "in front of ttprun" in found.change
    assert not (tmp_path / "started").exists()


def test_every_example_is_packaged() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    folder = ROOT / "launch"
    packaged = {path for pattern in data["mindio_tft_patch.launch"] for path in folder.glob(pattern)}
    assert set((folder / "examples").iterdir()) <= packaged


@pytest.mark.parametrize(
    ("environ", "judged"),
    [({}, True), ({"TFT_ADAPTOR": "own"}, False), ({"TFT_MINDSPEED": "sdk"}, False)],
)
def test_where_nothing_is_patched_an_import_may_stand_anywhere(
    tmp_path: Path, environ: dict[str, str], judged: bool
) -> None:
    path = script(tmp_path, "import mindspeed_llm\nimport mindio_tft_patch\n")
    findings = examine.examine(["ttprun", str(path), "--enable-high-availability"], environ).findings
    assert any("first import" in finding.change for finding in findings) is judged


@pytest.mark.parametrize(
    "text",
    [
        "(sleep 0.3; ttprun --nproc-per-node 2 train.py) > log 2>&1 &\n",
        "nohup sh -c 'sleep 0.3; exec ttprun --nproc-per-node 2 train.py' > log 2>&1 &\n",
        "setsid sh -c 'sleep 0.3; ttprun --nproc-per-node 2 train.py' &\n",
        "while true; do ttprun --nproc-per-node 2 train.py; sleep 0.05; done\n",
        "ttprun --nproc-per-node 2 train.py\nsleep 1000\n",
        'echo "PATH=$PATH" > path\n'
        "env -i MARK=$MARK $(command -v sh) -c 'sleep 0.3; . ./path; ttprun --nproc-per-node 2 train.py' &\n",
        "trap 'kill 0' EXIT\nsetsid sh -c 'sleep 0.3; exec ttprun second.py' &\nttprun --nproc-per-node 2 train.py\n",
        "(while :; do echo x || :; done) | head -1\nttprun --nproc-per-node 2 train.py\n",
    ],
    ids=["background", "nohup", "session", "loop", "long", "cleared", "kill 0", "broken pipe"],
)
def test_the_script_and_what_it_leaves_running_end_at_the_first_call(
    tmp_path: Path, environ: dict[str, str], text: str
) -> None:
    path = script(tmp_path, f"#!/bin/sh\n{text}")
    marked = {**environ, "MARK": str(tmp_path)}
    call = shell_script.recorded([str(path)], marked, limit_seconds=30)
    assert call.words == ("ttprun", "--nproc-per-node", "2", "train.py")
    assert not marked_with(tmp_path)
    assert not list(tmp_path.rglob("started"))


def test_what_never_calls_a_launcher_is_ended_as_well(tmp_path: Path, environ: dict[str, str]) -> None:
    path = script(tmp_path, "#!/bin/sh\nsleep 1000 &\nsleep 1000\n")
    with pytest.raises(ConfigError, match="has not called ttprun within"):
        shell_script.recorded([str(path)], {**environ, "MARK": str(tmp_path)}, limit_seconds=0.3)
    assert not marked_with(tmp_path)


def test_without_a_proc_file_system_the_group_of_the_script_ends(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell_script, "_descendants", lambda ancestor: set())
    monkeypatch.setattr(shell_script, "_GRACE_SECONDS", 0.2)
    path = script(tmp_path, "#!/bin/sh\nttprun train.py\nsleep 1000\n")
    assert shell_script.recorded([str(path)], {**environ, "MARK": str(tmp_path)}).words == ("ttprun", "train.py")
    assert not marked_with(tmp_path)
