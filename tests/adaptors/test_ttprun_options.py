"""--standby among torchrun's options."""

from __future__ import annotations

from argparse import Namespace

import pytest

from mindio_tft_patch.adaptors.ttprun_options import parse_ttprun
from mindio_tft_patch.errors import ConfigError


@pytest.mark.parametrize(
    ("line", "standby", "rest"),
    [
        ("--standalone train.py", 0, "--standalone train.py"),
        ("--standby --standalone train.py -x", 1, "--standalone train.py -x"),
        ("--standby 2 train.py", 2, "train.py"),
        ("--standby=3 --nproc-per-node 2 train.py", 3, "--nproc-per-node 2 train.py"),
        ("--nproc-per-node 2 --standby train.py --standby 5", 1, "--nproc-per-node 2 train.py --standby 5"),
        ("--standby train.py --standby", 1, "train.py --standby"),
        ("train.py --standby 4", 0, "train.py --standby 4"),
        ("--standby -m train", 1, "-m train"),
        ("-m train --standby", 0, "-m train --standby"),
    ],
)
def test_the_option_is_ours_before_the_script_and_the_scripts_behind_it(line: str, standby: int, rest: str) -> None:
    options, words = parse_ttprun(line.split())
    assert options.standby == standby
    assert words == rest.split()
    assert [options.training_script, *options.training_script_args] == words[words.index(options.training_script) :]


def test_a_number_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_ttprun(["--standby=many", "train.py"])
    assert "'many' is not a number" in capsys.readouterr().err


def test_help_tells_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_ttprun(["--help"])
    assert "--standby" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [("dump;retry", "'dump;retry' is none of dump, retry, recover"), ("Dump", "'Dump' is none of"), ("exit", "")],
)
def test_a_switch_of_which_no_word_is_known_is_told(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    from mindio_tft_patch.launch.ttprun import job_config

    assert not job_config(Namespace(training_script_args=[]), {"HIGH_AVAILABILITY": words}).high_availability
    error = capsys.readouterr().err
    assert said in error and bool(error) is bool(said)


FLAG = "--enable-high-availability"


def test_the_option_behind_the_script_is_refused_before_anything_is_started() -> None:
    from mindio_tft_patch.launch.ttprun import job_config

    options, _ = parse_ttprun(["--standalone", "train.py", FLAG, "--standby"])
    with pytest.raises(ConfigError, match=r"--standby stands behind the script's name.* Put it before"):
        job_config(options, {})
    assert job_config(options, {"TFT_ADAPTOR": "own"}).high_availability, "a trainer of one's own may have it"
    options, _ = parse_ttprun(["--standby", "--standalone", "train.py", FLAG])
    assert job_config(options, {}).high_availability
    unprotected, _ = parse_ttprun(["--standalone", "train.py", "--standby"])
    assert not job_config(unprotected, {}).high_availability, "torchrun would hand it on"
