"""The wheel in an environment of its own: `import mindio_ttp` works after pip install, and is gone after pip uninstall.

Needs the packages that a build and the core need, from where pip takes them; without them it is skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PTH = "mindio_tft_patch_old_names.pth"
NEEDED = ("pyzmq", "msgspec", "wrapt")
SOURCES = ("mindio_tft_patch", "adaptors", "launch", "pyproject.toml", "setup.py", "README.md", "LICENSE")
ASK = """
import sys
assert "mindio_tft_patch" not in sys.modules, "the line in the .pth file must import nothing"
import mindio_ttp.framework_ttp as ttp
import mindio_ttp.controller_ttp, mindio_ttp.utils
assert ttp.tft_exception_handler.__module__ == "mindio_tft_patch.adaptors.sdk.api"
assert ttp.RepairType.RT_SEND.value == 0
assert "torch" not in sys.modules
import mindio_tft_patch
assert mindio_tft_patch.installation() is None
assert sum(hasattr(one, "_mindio_tft_patch_old_names") for one in sys.meta_path) == 1
print("found")
"""

pytestmark = pytest.mark.nightly


class Environment:
    """A virtual environment."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=True, system_site_packages=False)
        self.python = folder / "bin/python"
        self.packages = next(folder.glob("lib/python*/site-packages"))

    def pip(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.python), "-m", "pip", "-q", "--disable-pip-version-check", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    def asks(self, code: str, flags: Sequence[str] = (), **environ: str) -> subprocess.CompletedProcess[str]:
        # Not from the checkout, whose packages would be found there.
        return subprocess.run(
            [str(self.python), "-c", code, *flags],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=self.packages.parent,
            env={**os.environ, "PYTHONPATH": "", **environ},
        )


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    made = Environment(tmp_path_factory.mktemp("environment"))
    if made.pip("install", "setuptools>=70", "wheel", *NEEDED).returncode != 0:
        pytest.skip(f"pip cannot install {', '.join(NEEDED)} here")
    return made


@pytest.mark.parametrize("how", ["wheel", "editable"])
def test_the_old_names_come_and_go_with_the_package(environment: Environment, sources: Path, how: str) -> None:
    option = ["-e"] if how == "editable" else []
    installed = environment.pip("install", "--no-deps", "--no-build-isolation", *option, str(sources))
    assert installed.returncode == 0, installed.stderr
    (record,) = environment.packages.glob("mindio_tft_patch-*.dist-info/RECORD")
    assert PTH in record.read_text()
    if how == "wheel":
        assert (environment.packages / "mindio_tft_patch/launch/examples/gpt_tiny_cpu.sh").is_file()
    asked = environment.asks(ASK, ["--enable-high-availability"])
    assert asked.stdout == "found\n", asked.stderr
    real = environment.asks("import mindio_ttp", TFT_MINDIO_TTP="real")
    assert "No module named 'mindio_ttp'" in real.stderr
    assert environment.pip("uninstall", "-y", "mindio-tft-patch").returncode == 0
    assert not (environment.packages / PTH).exists()
    gone = environment.asks("import mindio_ttp")
    assert gone.returncode == 1 and "No module named 'mindio_ttp'" in gone.stderr


def test_a_file_that_was_left_behind_breaks_no_interpreter(environment: Environment) -> None:
    from mindio_tft_patch.old_names import PTH_LINE

    left = environment.packages / PTH
    left.write_text(PTH_LINE + "\n")
    try:
        asked = environment.asks("import json; print('alive')")
        assert (asked.stdout, asked.stderr) == ("alive\n", "")
        missing = environment.asks("import mindio_ttp")
        assert "ModuleNotFoundError" in missing.stderr
    finally:
        left.unlink()
