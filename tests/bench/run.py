"""`make bench`: what the plugin costs while nothing goes wrong, and how fast it saves when something does.

    run.py [--only steps dump kill recovery] [--quick] [--rounds N] [--ranks N] [--layers N] [--sequence N]
           [--output FILE] [--folder FOLDER]

Prints tables and writes build/bench.json. All ratios come from pairs of runs that are made right after one another.
docs/benchmarks.md explains each number. TFT_BENCH_PEERS=/path/to/python: an environment with other projects to compare.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.table import Table
from support.jobs import ForkServer

from bench.contenders import contenders
from bench.measure import Bench, Results, Say, Size
from bench.recovery import RecoveryBench
from bench.recovery_table import notes, ours_is_well, phase_table, recovery_table
from bench.targets import TARGETS, verdict

ROOT = Path(__file__).parents[2]
QUICK = {
    "layout_seconds": 0.0,
    "plain_seconds": 0.0,
    "probe_blocks": 1,
    "dump_layers": 4,
    "small_dump_layers": 2,
    "dumps": 2,
    "kills": 1,
}
PARTS = ("steps", "dump", "kill", "recovery")
WHAT = {
    "overhead_vs_same_layout": "step time, plugin on against off",
    "cpu_overhead_vs_same_layout": "CPU time of a step, all ranks, on against off",
    "overhead_vs_plain": "step time against plain Megatron",
    "gate_seconds": "commit gate, a step",
    "gate_marks_seconds": "  of that without the barrier",
    "heartbeat_seconds": "heartbeats, CPU time of a rank",
    "launcher_cpu_seconds": "launcher with controller, CPU time",
    "dump_vs_torch_save": "dump against torch.save + fsync",
    "dump_seconds": "  dump",
    "torch_save_seconds": "  torch.save + fsync of as many bytes",
    "dump_vs_torch_save_small": "the same with a small model",
    "dump_seconds_small": "  dump",
    "torch_save_seconds_small": "  torch.save + fsync of as many bytes",
    "dump_vs_torch_save_torch_format": "the same in the format `torch`",
    "dump_seconds_torch_format": "  dump",
    "torch_save_seconds_torch_format": "  torch.save + fsync of as many bytes",
    "kill_to_checkpoint_seconds": "SIGKILL of a rank until the tracker is written",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    options = _options(argv)
    size = replace(Size(), **(QUICK if options.quick else {}), **_given(options, "ranks", "layers", "sequence"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and so through all that ends what was started
    console = Console(width=None if sys.stdout.isatty() else 160)
    began, load = time.time(), os.getloadavg()[0]
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=options.folder))
    content: dict[str, Any] = {}
    well = True
    try:
        with console.status("starting") as status:
            facts, results = _measure_plugin(options.only, folder, size, status.update)
            if "recovery" in options.only:
                content, well = _measure_recovery(console, folder, options.rounds, status.update, results)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    facts |= {"load_before": round(load, 1), "load_after": round(os.getloadavg()[0], 1)}  # the benchmark's own included
    facts["bench_seconds"] = round(time.time() - began)
    if any(name in WHAT for name in results):
        console.print(_table({name: one for name, one in results.items() if name in WHAT}))
    console.print("  ".join(f"{name} {value}" for name, value in facts.items() if not isinstance(value, (dict, list))))
    output = Path(options.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    for name, one in results.items():
        group, _, key = name.rpartition(".")
        (content.setdefault(group, {}) if group else content)[key] = one.as_json()
    output.write_text(json.dumps({"machine": facts, **content}, indent=2) + "\n")
    console.print(f"written to {output}")
    if not well:
        sys.exit("a recovery of ours has failed or was not bit-equal")


def _measure_plugin(parts: Sequence[str], folder: Path, size: Size, say: Say) -> tuple[dict[str, Any], Results]:
    """What it costs, and how it dumps; facts and results."""
    results: Results = {}
    facts = _facts(size)
    wanted = [name for name in parts if name != "recovery"]
    if not wanted:
        return facts, results
    server = ForkServer(folder / "server.txt")
    try:
        bench = Bench(server, folder, size, say)
        for name in wanted:
            results |= getattr(bench, name)()
    finally:
        server.close()
    facts["step_seconds"] = {name: round(value, 5) for name, value in bench.step_seconds.items()}
    facts["dumped"] = bench.dumped
    return facts, results


def _measure_recovery(
    console: Console, folder: Path, rounds: int, say: Say, results: Results
) -> tuple[dict[str, Any], bool]:
    """Recoveries side by side. Adds to the results.

    Returns:
        What goes into the file beside them; whether our own are in order.
    """
    everybody = contenders()
    bench = RecoveryBench(folder, rounds, [one for one in everybody if one.available()], say)
    found = bench.measure()
    results |= found
    for table in (recovery_table(bench, everybody, found), phase_table(bench, found)):
        console.print(table)
    for name in TARGETS:
        if name in found:
            console.print(f"{name}: {found[name].shown()[0]}, {verdict(name, found[name])}")
    for note in notes(bench, everybody):
        console.print(note, markup=False)
    content = {
        "bit_equal": bench.bit_equal,
        "ranks_after": {name: sorted({o.world_after for o in by.values()}) for name, by in bench.outcomes.items()},
        "failures": {name: len(texts) for name, texts in bench.failures.items()},
        "peers": {one.name: one.version for one in everybody if one.version},
    }
    return content, ours_is_well(bench)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure")
    parser.add_argument("--quick", action="store_true", help="few runs: to see that it works")
    parser.add_argument("--rounds", type=int, help="jobs of each contender in which a rank is killed (default 3)")
    parser.add_argument("--ranks", type=int, help="data-parallel size; even")
    parser.add_argument("--layers", type=int, help="layers of the model whose steps are measured")
    parser.add_argument("--sequence", type=int, help="tokens of a sample")
    parser.add_argument("--output", default=ROOT / "build" / "bench.json")
    parser.add_argument("--folder", default=None, help="on the disk that is to be measured; default: the temporary one")
    options = parser.parse_args(argv)
    options.rounds = options.rounds or (1 if options.quick else 3)
    return options


def _given(options: argparse.Namespace, *names: str) -> dict[str, int]:
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def _facts(size: Size) -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "megatron": importlib.metadata.version("megatron-core"),
        "hidden_size": size.hidden,
        "ranks": size.ranks,
        "size": asdict(size),
    }


def _table(results: Results) -> Table:
    table = Table(title="mindio_tft_patch benchmark")
    for name in ("", "median", "95 % interval of it", "minimum", "maximum", "runs", "target"):
        table.add_column(name, justify="left" if not name else "right")
    for name, summary in results.items():
        table.add_row(WHAT[name], *summary.shown(), verdict(name, summary))
    return table


if __name__ == "__main__":
    main()
