"""Tables of recoveries, side by side, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from bench.contenders import Contender, Ours, OursStandby
from bench.recovery import FAULTS, RecoveryBench
from bench.summary import Summary

_MEDIANS = ("torchrun_vs", "caught_up_seconds", "steps_lost")
_LOOPS = (
    "mindio_tft_patch and torchrun run real Megatron (GPT: 4 layers, hidden size 64), the others a loop of plain torch "
    "(8 linear layers of 256 x 256, AdamW) of about the same step time: tests/bench/peers/loop.py."
)


def recovery_table(bench: RecoveryBench, contenders: Sequence[Contender], results: Mapping[str, Summary]) -> Table:
    """kill -9 of one of four ranks, for everybody."""
    table = Table(title="kill -9 of a rank until the next step is complete", caption=_LOOPS)
    columns = (
        "",
        "median",
        "min .. max",
        "torchrun takes",
        "caught up",
        "steps lost",
        "bit-equal",
        "ranks",
        "runs",
    )
    for name in columns:
        table.add_column(name, justify="left" if not name else "right")
    for one in contenders:
        failed = len(bench.failures.get(one.name, ()))
        outcomes = list(bench.outcomes.get(one.name, {}).values())
        if not one.available():
            table.add_row(one.what, "not installed", *[""] * (len(columns) - 2))
        elif not outcomes:
            table.add_row(one.what, "[red]failed[/]", *[""] * (len(columns) - 2))
        else:
            seconds = results[f"mttr_seconds.{one.name}"].shown()
            table.add_row(
                one.what,
                seconds[0],
                f"{seconds[2]} .. {seconds[3]}",
                *(_median(results, f"{name}.{one.name}") for name in _MEDIANS),
                _yes(bench.bit_equal.get(one.name)),
                " or ".join(str(world) for world in sorted({outcome.world_after for outcome in outcomes})),
                f"{len(outcomes)}" + (f" [red]({failed} failed)[/]" if failed else ""),
            )
    return table


def phase_table(bench: RecoveryBench, results: Mapping[str, Summary]) -> Table:
    """Where the time goes, and repairs without the loss of a process."""
    table = Table(title="where the time goes (medians)")
    for name in ("", "with a stand-by", "without"):
        table.add_column(name, justify="left" if not name else "right")
    phases = [name.partition(".")[2] for name in results if name.startswith("phase_seconds.")]
    for phase in phases:
        pair = (f"phase_seconds.{phase}", f"phase_seconds_without_standby.{phase}")
        table.add_row(phase, *(_median(results, name) for name in pair))
    table.add_section()
    for kind in FAULTS.values():
        if f"{kind}_seconds" in results:
            whole, beyond = _median(results, f"{kind}_steps"), _median(results, f"{kind}_seconds")
            equal = _yes(bench.bit_equal.get(kind))
            table.add_row(kind.replace("_", " "), f"{whole}: {beyond} and one step", f"bit-equal: {equal}")
    if "rebuild_groups_seconds" in results:
        table.add_row("rebuild of all groups, slowest rank", _median(results, "rebuild_groups_seconds"), "")
    return table


def notes(bench: RecoveryBench, contenders: Sequence[Contender]) -> list[str]:
    """What is not in the tables: who is not installed, and why trials failed."""
    absent = [f"{one.name} is not installed: {one.install}" for one in contenders if not one.available()]
    return absent + [f"{name} failed: {text}" for name, texts in bench.failures.items() for text in texts]


def ours_is_well(bench: RecoveryBench) -> bool:
    """None of our own jobs failed or ended otherwise than the unbroken one."""
    mine = (Ours.name, OursStandby.name, *FAULTS.values())
    return not {*mine, "faults"} & set(bench.failures) and all(bench.bit_equal.get(name, True) for name in mine)


def _median(results: Mapping[str, Summary], name: str) -> str:
    return results[name].shown()[0] if name in results else ""


def _yes(value: bool | None) -> str:
    return "" if value is None else "[green]yes[/]" if value else "[red]no[/]"
