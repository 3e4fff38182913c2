"""What the launcher says last."""

from __future__ import annotations

from dataclasses import replace

from mindio_tft_patch.launch.report import Death, Ending, describe_exit, final_lines, formatted
from mindio_tft_patch.protocol.messages import Do, Plan
from mindio_tft_patch.protocol.phases import Phase, Strategy

SAVED = Do(1, Phase.EXIT, Plan(Strategy.DUMP, "rank 2 died", target_step=57, detail="/save/iter_0000057"))
ENDING = Ending(node=0, deaths=(Death(2, 4711, -9, 1.0),), verdict=SAVED)


def test_the_report_names_the_rank_the_signal_the_reason_and_the_checkpoint() -> None:
    text = formatted(final_lines(ENDING))
    assert "rank 2 (node 0, pid 4711) was killed by SIGKILL" in text
    assert "reason: rank 2 died" in text
    assert "checkpoint: step 57 in /save/iter_0000057" in text
    assert all(line.startswith("ttprun: ") for line in text.splitlines())


def test_without_a_dump_it_says_that_older_checkpoints_are_untouched() -> None:
    nothing = Do(1, Phase.EXIT, Plan(Strategy.EXIT, "no healthy copy of shard 1"))
    lines = final_lines(replace(ENDING, verdict=nothing))
    assert "reason: no healthy copy of shard 1" in lines
    assert lines[-1] == "checkpoint: none was written now; older checkpoints are as they were"


def test_a_dump_that_took_too_long_names_the_variable_to_raise() -> None:
    lines = final_lines(
        replace(ENDING, verdict=None, out_of_time=True, patience_seconds=120.0, ended_by_launcher=(0, 1))
    )
    assert any("within 120 s" in line and "TTP_OT" in line for line in lines)
    assert any("rank(s) 0, 1" in line for line in lines)


def test_a_signal_to_the_launcher_is_named() -> None:
    assert final_lines(replace(ENDING, signal=15))[0] == "the job ended because the launcher received SIGTERM"


def test_a_restart_is_announced() -> None:
    lines = final_lines(replace(ENDING, restarts_left=2))
    assert lines[0] == "the attempt ended after a fault"
    assert lines[-1] == "starting all ranks again; 1 restart is left after this one"


def test_exit_codes_are_told_from_signals() -> None:
    assert describe_exit(-11) == "was killed by SIGSEGV"
    assert describe_exit(3) == "ended with exit code 3"
