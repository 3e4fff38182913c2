"""The doctor of a trainer with handlers of its own (TFT_ADAPTOR=own): ours is examined, Megatron's is left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindio_tft_patch.adaptors.doctor import examine, reading, view
from mindio_tft_patch.adaptors.doctor.command import Command, Launch
from mindio_tft_patch.adaptors.doctor.findings import Level
from mindio_tft_patch.adaptors.doctor.reading import Reading

OWN = {"TFT_ADAPTOR": "own", "TFT_DEVICE": "cpu"}
# A save folder and sizes that Megatron would judge, and a flag that it does not know.
THEIRS = ("--save", "/dev/null/ckpt", "--tensor-model-parallel-size", "3", "--my-own-flag", "--data-path", "/absent")
PROTECTED = ("--enable-high-availability", "--enable-worker-reboot")


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("import mindio_tft_patch\n")
    return str(path)


@pytest.fixture(autouse=True)
def answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child's answer is given here; what it does not ask is tested below."""

    def ask(command: Command, environ: object) -> Reading:
        words = command.words
        launch = Launch(ranks_per_node=4, master_port=0, static=False, script=words[0], script_args=tuple(words[1:]))
        return Reading(launch=launch, torch="2.14.1")

    monkeypatch.setattr(reading, "ask", ask)


def examined(script: str, *words: str, **environ: str) -> examine.Report:
    return examine.examine(["ttprun", script, *words], {**OWN, **environ})


def test_a_good_job_has_no_errors_and_one_line_says_what_was_left_out(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report = examined(script, *PROTECTED, *THEIRS)
    errors = [one for one in report.findings if one.level is Level.ERROR and one.area not in ("network", "versions")]
    assert not errors
    (left_out,) = [one for one in report.findings if "not looked at" in one.message]
    assert "TFT_ADAPTOR=own" in left_out.message and "save folder" in left_out.message
    said = " ".join(f"{one.message} {one.change}" for one in report.findings if one is not left_out)
    assert not [word for word in ("Megatron", "--save", "--my-own-flag", "data-parallel", "/absent") if word in said]
    assert report.faults == ()
    view.show(report, as_json=False)
    assert "What a fault will lead to was not looked at." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "environ", "level", "said"),
    [
        ((*PROTECTED,), {"TFT_INJECT": "rank=1,step=2,moment=lunch,kind=exit"}, Level.ERROR, "unknown moment"),
        ((*PROTECTED,), {"TFT_INJECT": "rank=9,step=2,moment=forward,kind=exit"}, Level.WARNING, "names rank 9"),
        ((*PROTECTED,), {"TFT_HANG_SECOND": "9"}, Level.WARNING, "TFT_HANG_SECOND=9 is not a variable"),
        (("--enable-worker-reboot",), {}, Level.ERROR, "no effect without the master switch"),
        ((*PROTECTED, "--enable-hbmfault-repairs"), {}, Level.ERROR, "--enable-hbmfault-repairs is not a flag"),
        ((*PROTECTED, "--enable-elastic-training"), {}, Level.ERROR, "fewer ranks"),
        ((), {}, Level.WARNING, "not protected"),
        ((*PROTECTED,), {"TFT_DEVICE": "npu"}, Level.ERROR, "TFT_DEVICE=npu"),
        ((*PROTECTED,), {"TFT_DEVICE": ""}, Level.WARNING, "No accelerator"),
    ],
)
def test_what_is_ours_is_examined(
    script: str, words: tuple[str, ...], environ: dict[str, str], level: Level, said: str
) -> None:
    found = [one for one in examined(script, *words, **environ).findings if said in one.message]
    assert [one.level for one in found] == [level]


def test_a_script_that_is_not_there_is_still_an_error(script: str) -> None:
    found = [one for one in examined(f"{script}.absent", *PROTECTED).findings if "There is no script" in one.message]
    assert [one.level for one in found] == [Level.ERROR]


def test_the_child_does_not_ask_megatron(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_parse", lambda told: pytest.fail("Megatron's parser was asked"))
    monkeypatch.setenv("TFT_ADAPTOR", "own")
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    words = ["--nproc-per-node", "4", script, "--save"]
    told = reading.answer({"launcher": "ttprun", "words": words, "environ": OWN})
    assert told.launch.world_size == 4 and told.torch
    assert (told.megatron, told.refusal, told.trouble, told.arguments) == ("", "", "", {})
