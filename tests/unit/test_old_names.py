"""The finder: who answers to `import mindio_ttp`, and that the line in the .pth file is harmless."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindio_tft_patch import old_names


@pytest.fixture(autouse=True)
def no_finder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(old_names.SWITCH, raising=False)
    finders, modules = list(sys.meta_path), dict(sys.modules)
    old_names.uninstall()
    old_names.imported_by_old_name()  # what another test has left
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "mindio_ttp" and name not in modules]:
        del sys.modules[name]
    sys.meta_path[:] = finders


def original(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The original is installed."""
    package = folder / "mindio_ttp"
    (package / "framework_ttp").mkdir(parents=True)
    (package / "__init__.py").write_text("ORIGINAL = True\n")
    (package / "framework_ttp/__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()


def run_pth_line() -> None:
    exec(old_names.PTH_LINE, {})


@pytest.mark.parametrize("put_there", [old_names.install, run_pth_line])
def test_our_modules_are_found_when_there_is_no_original(put_there: object) -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("mindio_ttp")
    put_there()  # type: ignore[operator]
    assert old_names.is_ours(importlib.import_module("mindio_ttp"))
    assert old_names.is_ours(importlib.import_module("mindio_ttp.framework_ttp"))


@pytest.mark.parametrize("put_there", [old_names.install, run_pth_line])
def test_an_original_wins(put_there: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original(tmp_path, monkeypatch)
    put_there()  # type: ignore[operator]
    assert importlib.import_module("mindio_ttp").ORIGINAL
    # Nothing of ours gets into it.
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("mindio_ttp.megatron_ttp")


@pytest.mark.parametrize("put_there", [old_names.install, run_pth_line])
def test_the_switch_puts_ours_in_front(put_there: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original(tmp_path, monkeypatch)
    monkeypatch.setenv(old_names.SWITCH, "ours")
    put_there()  # type: ignore[operator]
    assert old_names.is_ours(importlib.import_module("mindio_ttp"))
    assert old_names.is_ours(importlib.import_module("mindio_ttp.megatron_ttp"))


def test_the_switch_leaves_it_to_the_original_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(old_names.SWITCH, "real")
    old_names.install()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("mindio_ttp")


def test_the_finder_is_there_once() -> None:
    run_pth_line()
    run_pth_line()  # as the interpreter does in a virtual environment
    old_names.install()
    before = len(sys.meta_path)
    old_names.install()
    assert len(sys.meta_path) == before
    assert sum(hasattr(one, "_mindio_tft_patch_old_names") or one is old_names.Finder for one in sys.meta_path) == 1


def test_other_imports_pass_the_line_by() -> None:
    run_pth_line()
    finder = next(one for one in sys.meta_path if hasattr(one, "_mindio_tft_patch_old_names"))
    assert finder.find_spec("json") is None
    assert finder.find_spec("mindio_ttp_other") is None
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        importlib.import_module("no_such_module")
    importlib.invalidate_caches()


def test_the_line_is_one_that_site_runs() -> None:
    assert old_names.PTH_LINE.startswith("import ")
    assert "\n" not in old_names.PTH_LINE


def test_the_line_in_the_wheel_is_this_one() -> None:
    source = (Path(__file__).parents[2] / "setup.py").read_text(encoding="utf-8")
    space: dict[str, object] = {"__file__": str(Path(__file__).parents[2] / "setup.py"), "__name__": "not run"}
    exec(source.rpartition("\nsetup(")[0], space)
    assert space["pth_line"]() == old_names.PTH_LINE  # type: ignore[operator]


def test_the_import_by_an_old_name_is_told_from_another_once() -> None:
    assert not old_names.imported_by_old_name()
    run_pth_line()
    importlib.import_module("mindio_ttp")
    assert old_names.imported_by_old_name()
    assert not old_names.imported_by_old_name()


@pytest.mark.parametrize("switch", [None, "ours", "real"])
def test_a_job_with_our_flags_is_told_of_an_original(
    switch: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original(tmp_path, monkeypatch)
    environ = {} if switch is None else {old_names.SWITCH: switch}
    old_names.warn_of_original({**environ, "RANK": "1"})
    assert capsys.readouterr().err == ""
    old_names.warn_of_original({**environ, "RANK": "0"})
    said = capsys.readouterr().err
    assert ("the original mindio_ttp is installed" in said) is (switch is None)


def test_nothing_is_said_without_an_original(capsys: pytest.CaptureFixture[str]) -> None:
    old_names.install()
    old_names.warn_of_original({})
    importlib.import_module("mindio_ttp")
    old_names.warn_of_original({})
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("put_there", [old_names.install, run_pth_line])
def test_a_folder_without_code_does_not_hide_ours(
    put_there: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mindio_ttp").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    put_there()  # type: ignore[operator]
    assert old_names.is_ours(importlib.import_module("mindio_ttp.framework_ttp"))
    old_names.warn_of_original({})
    assert capsys.readouterr().err == ""
