"""The measurements: each makes its jobs, lets them take turns, and returns summaries by the name in bench.json."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from support.folders import TRACKER
from support.jobs import ForkServer
from support.tiny_gpt import tiny_gpt_args

from bench.conductor import BenchSpec, ConductedJob
from bench.contenders import FLAGS
from bench.cpu_clocks import process_cpu_seconds
from bench.dump_duel import DumpDuel
from bench.summary import Summary, overhead, ratio, summarize

NEVER = 10**7
Results = dict[str, Summary]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Size:
    """How much is measured.

    block_steps: steps of a block. layout_seconds, plain_seconds: time for pairs of blocks, with the plugin turned off
    and of plain Megatron.
    dump_layers, small_dump_layers: layers of the models that are saved; a layer has about 12 hidden^2 parameters of 14
    bytes.
    """

    ranks: int = 4
    hidden: int = 512
    layers: int = 2
    sequence: int = 32
    block_steps: int = 2
    layout_seconds: float = 180.0
    plain_seconds: float = 90.0
    probe_blocks: int = 6
    probe_steps: int = 20
    dump_layers: int = 24
    small_dump_layers: int = 4
    dumps: int = 7
    kills: int = 7


class Bench:
    """Measures one size.

    Args:
        server: where jobs are forked, so that they start in seconds.
        folder: for their files; on the disk that is measured.
        say: is told what is going on.
    """

    def __init__(self, server: ForkServer, folder: Path, size: Size, say: Say) -> None:
        self._server = server
        self._folder = folder
        self.size = size
        self._say = say
        self.step_seconds: dict[str, float] = {}
        self.dumped: dict[str, Any] = {}

    def _spec(
        self, name: str, *, layers: int = 0, plugin: bool = True, conducted: bool = True, **gpt: Any
    ) -> BenchSpec:
        size = self.size
        extra = ["--hidden-size", size.hidden, "--ffn-hidden-size", 4 * size.hidden, "--num-attention-heads", 8]
        extra += ["--num-layers", layers or size.layers, "--log-interval", 100, "--save-interval", NEVER]
        extra += ["--seq-length", size.sequence, "--max-position-embeddings", size.sequence, "--train-iters", 20000]
        arguments = tiny_gpt_args(
            data_prefix=None,
            save=str(self._folder / name / "save"),
            eval_interval=NEVER,
            extra=[str(word) for word in extra],
            **gpt,
        )
        return BenchSpec(self._folder / name, arguments, plugin=plugin, ranks=size.ranks, conducted=conducted)

    # ---------------------------------------------------------------- steps

    def steps(self) -> Results:
        """Step time with the plugin, without it in the same layout, and of plain Megatron; gate and heartbeat."""
        with_plugin = ConductedJob(self._server, replace(self._spec("plugin"), flags=FLAGS))
        plain = None
        try:
            plain = ConductedJob(self._server, self._spec("plain", plugin=False))
            for job, mode in ((plain, "plain"), (with_plugin, "on"), (with_plugin, "off")):
                job.block(mode, steps=5)
            results = self._same_layout(with_plugin)
            results |= self._against_plain(with_plugin, plain)
            return results | self._probes(with_plugin)
        finally:
            with_plugin.end()
            if plain is not None:
                plain.end()

    def _same_layout(self, job: ConductedJob) -> Results:
        seconds: dict[str, list[float]] = {"on": [], "off": []}
        cpu: dict[str, list[float]] = {"on": [], "off": []}
        for number in self._for("same layout", self.size.layout_seconds):
            # on off, off on: what grows during a pair adds to each of them as often as to the other.
            for mode in ("on", "off") if number % 2 else ("off", "on"):
                answers = job.block(mode, self.size.block_steps)
                seconds[mode].append(max(one["seconds"] for one in answers))
                cpu[mode].append(sum(one["cpu_seconds"] for one in answers))
        for mode, values in seconds.items():
            self.step_seconds[mode] = median(values) / self.size.block_steps
        return {
            "overhead_vs_same_layout": overhead(seconds["on"], seconds["off"]),
            "cpu_overhead_vs_same_layout": overhead(cpu["on"], cpu["off"]),
        }

    def _against_plain(self, job: ConductedJob, plain: ConductedJob) -> Results:
        seconds: dict[str, list[float]] = {"on": [], "plain": []}
        for number in self._for("plain Megatron", self.size.plain_seconds):
            for mode in ("on", "plain") if number % 2 else ("plain", "on"):
                # The first step finds the other job's data in the caches.
                one = plain if mode == "plain" else job
                seconds[mode].append(one.seconds(mode, self.size.block_steps, untimed=1))
        self.step_seconds["plain"] = median(seconds["plain"])
        return {"overhead_vs_plain": overhead(seconds["on"], seconds["plain"])}

    def _probes(self, job: ConductedJob) -> Results:
        gate: list[float] = []
        marks: list[float] = []
        beats: list[float] = []
        controller: list[float] = []
        for number in range(self.size.probe_blocks):
            began, launcher = time.perf_counter(), process_cpu_seconds(job.job.pid)
            answers = job.block("probe", self.size.probe_steps)
            controller.append((process_cpu_seconds(job.job.pid) - launcher) / (time.perf_counter() - began))
            beats += [one["control_cpu_seconds"] / one["seconds"] for one in answers]
            # One value a step: that of the middle rank. The last one to be woken up is the machine's affair.
            gate += [median(step) for step in zip(*(one["gate"] for one in answers), strict=True)]
            marks += [median(step) for step in zip(*(one["marks"] for one in answers), strict=True)]
            self._progress("gate and heartbeat", number, self.size.probe_blocks)
        return {
            "gate_seconds": summarize(gate, "s"),
            "gate_marks_seconds": summarize(marks, "s"),
            "heartbeat_seconds": summarize(beats, "s/s"),
            "launcher_cpu_seconds": summarize(controller, "s/s"),
        }

    # ---------------------------------------------------------------- dump

    def dump(self) -> Results:
        """The dump against torch.save and fsync of as many bytes by the same ranks, taking turns."""
        size = self.size
        return {
            **self._dump("", size.dump_layers),
            **self._dump("_small", size.small_dump_layers),
            **self._dump("_torch_format", size.dump_layers, ckpt_format="torch"),
        }

    def _dump(self, suffix: str, layers: int, **gpt: Any) -> Results:
        name = f"dump{suffix}"
        job = ConductedJob(self._server, self._spec(name, layers=layers, **gpt))
        try:
            job.block("on", steps=2)
            duel = DumpDuel(job, self._folder / name)
            for number in range(self.size.dumps):
                duel.round(number)
                self._progress(name, number, self.size.dumps)
        finally:
            job.end()
        self.dumped[name] = {"bytes": duel.written, "part_seconds": duel.part_seconds()}
        return {
            f"dump_vs_torch_save{suffix}": ratio(duel.dumps, duel.saves),
            f"dump_seconds{suffix}": summarize(duel.dumps, "s"),
            f"torch_save_seconds{suffix}": summarize(duel.saves, "s"),
        }

    # ---------------------------------------------------------------- kill

    def kill(self) -> Results:
        """SIGKILL of a rank in the midst of training until the tracker names the checkpoint of the survivors."""
        seconds = []
        chance = random.Random(20241129)
        for number in range(self.size.kills):
            seconds.append(self._kill_once(f"kill-{number}", number % self.size.ranks, chance.random()))
            self._progress("kill", number, self.size.kills)
        return {"kill_to_checkpoint_seconds": summarize(seconds, "s")}

    def _kill_once(self, name: str, rank: int, delay_seconds: float) -> float:
        job = self._server.start(self._spec(name, conducted=False), blanks=self.size.ranks)
        tracker = self._folder / name / "save" / TRACKER
        try:
            job.wait_for("committed", 3, rank=rank, seconds=180.0)
            time.sleep(delay_seconds)
            began = time.perf_counter()
            os.kill(job.rank_pids()[rank], signal.SIGKILL)
            deadline = began + 120.0
            while not tracker.exists():
                if time.perf_counter() > deadline:
                    raise RuntimeError(f"no checkpoint\n{job.story()}")
                time.sleep(0.002)
            took = time.perf_counter() - began
            job.wait(120.0)
        finally:
            job.kill()
        shutil.rmtree(self._folder / name, ignore_errors=True)
        return took

    def _progress(self, what: str, number: int, of: int) -> None:
        self._say(f"{what} {number + 1}/{of}")

    def _for(self, what: str, seconds: float) -> Iterator[int]:
        """Count until the time is over; at least to four, and to an even number."""
        began = time.monotonic()
        for number in itertools.count():
            passed = time.monotonic() - began
            if passed >= seconds and number >= 4 and number % 2 == 0:
                return
            self._say(f"{what}: {passed:.0f} of {seconds:.0f} s")
            yield number
