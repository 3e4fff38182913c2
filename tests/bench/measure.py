"""The measurements: each makes its jobs, lets them take turns, and returns summaries by the name in bench.json."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from support.folders import TRACKER
from support.jobs import ForkServer
from support.tiny_gpt import tiny_gpt_args

from bench.conductor import BenchSpec, ConductedJob
from bench.cpu_clocks import process_cpu_seconds
from bench.summary import Summary, overhead, ratio, summarize

NEVER = 10**7
Results = dict[str, Summary]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Size:
    """How much is measured.

    step_pairs, plain_pairs: pairs of blocks. block_steps: steps of a block.
    dump_layers: layers of the model that is saved; a layer has about 12 hidden^2 parameters of 14 bytes.
    """

    ranks: int = 4
    hidden: int = 512
    layers: int = 2
    sequence: int = 32
    block_steps: int = 2
    step_pairs: int = 120
    plain_pairs: int = 60
    probe_blocks: int = 6
    probe_steps: int = 10
    dump_layers: int = 24
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
        self.dumped_bytes: list[int] = []
        self.dump_parts: dict[str, float] = {}

    def _spec(self, name: str, *, layers: int = 0, plugin: bool = True, conducted: bool = True) -> BenchSpec:
        size = self.size
        extra = ["--hidden-size", size.hidden, "--ffn-hidden-size", 4 * size.hidden, "--num-attention-heads", 8]
        extra += ["--num-layers", layers or size.layers, "--log-interval", 100, "--save-interval", NEVER]
        extra += ["--seq-length", size.sequence, "--max-position-embeddings", size.sequence, "--train-iters", 20000]
        arguments = tiny_gpt_args(
            data_prefix=None,
            save=str(self._folder / name / "save"),
            eval_interval=NEVER,
            extra=[str(word) for word in extra],
        )
        return BenchSpec(self._folder / name, arguments, plugin=plugin, ranks=size.ranks, conducted=conducted)

    # ---------------------------------------------------------------- steps

    def steps(self) -> Results:
        """Step time with the plugin, without it in the same layout, and of plain Megatron; gate and heartbeat."""
        with_plugin = ConductedJob(self._server, self._spec("plugin"))
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
        for number in range(self.size.step_pairs):
            # on off, off on: what grows during a pair adds to each of them as often as to the other.
            for mode in ("on", "off") if number % 2 else ("off", "on"):
                answers = job.block(mode, self.size.block_steps)
                seconds[mode].append(max(one["seconds"] for one in answers))
                cpu[mode].append(sum(one["cpu_seconds"] for one in answers))
            self._progress("same layout", number, self.size.step_pairs)
        for mode, values in seconds.items():
            self.step_seconds[mode] = median(values) / self.size.block_steps
        return {
            "overhead_vs_same_layout": overhead(seconds["on"], seconds["off"]),
            "cpu_overhead_vs_same_layout": overhead(cpu["on"], cpu["off"]),
        }

    def _against_plain(self, job: ConductedJob, plain: ConductedJob) -> Results:
        seconds: dict[str, list[float]] = {"on": [], "plain": []}
        for number in range(self.size.plain_pairs):
            for mode in ("on", "plain") if number % 2 else ("plain", "on"):
                # The first step finds the other job's data in the caches.
                one = plain if mode == "plain" else job
                seconds[mode].append(one.seconds(mode, self.size.block_steps, untimed=1))
            self._progress("plain Megatron", number, self.size.plain_pairs)
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
        job = ConductedJob(self._server, self._spec("dump", layers=size.dump_layers))
        try:
            job.block("on", steps=2)
            faulty, alive = [size.ranks - 1], list(range(size.ranks - 1))
            told = [one["sets"] for one in job.ask({"do": "tell_replica_sets"})]
            sets = [list(one) for one in sorted({(name, tuple(ranks)) for sets in told for name, ranks in sets})]
            command = {"do": "dump_checkpoint", "faulty": faulty, "alive": alive, "sets": sets}
            attempts = itertools.count(1)
            written: list[int] = []
            parts: list[dict[str, float]] = []

            def dump() -> float:
                attempt = next(attempts)
                place = self._folder / "dump" / f"dump-{attempt}"
                answers = job.ask({**command, "attempt": attempt, "save": str(place)}, alive)
                written[:] = [one["bytes"] for one in answers]
                parts.append(answers[0]["parts"])
                shutil.rmtree(place)
                return max(one["seconds"] for one in answers)

            def torch_save() -> float:
                places = {rank: self._folder / "dump" / f"saved-{rank}" for rank in alive}
                sizes = zip(alive, written, strict=True)
                own = {rank: {"path": str(places[rank]), "size": size} for rank, size in sizes}
                answers = job.ask({"do": "torch_save"}, alive, own)
                for place in places.values():
                    place.unlink()
                return max(one["seconds"] for one in answers)

            dump(), torch_save()  # the first of each imports, and builds caches
            times: dict[Callable[[], float], list[float]] = {dump: [], torch_save: []}
            for number in range(size.dumps):
                for what in (dump, torch_save) if number % 2 else (torch_save, dump):
                    times[what].append(what())
                self._progress("dump", number, size.dumps)
            self.dumped_bytes = list(written)
            self.dump_parts = {name: median(one[name] for one in parts[1:]) for name in parts[-1]}
        finally:
            job.end()
        return {
            "dump_vs_torch_save": ratio(times[dump], times[torch_save]),
            "dump_seconds": summarize(times[dump], "s"),
            "torch_save_seconds": summarize(times[torch_save], "s"),
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
