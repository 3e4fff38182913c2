"""One training job of the demonstration: started through `ttprun`, watched by its output and its JSON log."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindio_tft_patch.fault_injection import STATE_VARIABLE, VARIABLE
from mindio_tft_patch.fired_faults import FiredFaults, Firing
from mindio_tft_patch.launch.drill.findings import Line, Run, read_line
from mindio_tft_patch.launch.drill.job import read_logs
from mindio_tft_patch.launch.tail import Tail
from mindio_tft_patch.proc_stat import processes

RANKS = 4
_PORTS = range(20_000, 30_000)  # below those that systems give to connections (32768 and more on Linux)
_PORT_TRIES = 5
IN_PLACE = "--enable-hbmfault-repair --enable-worker-reboot"

# A GPT of 0.2 million parameters; dropout, so that a wrong generator state would show at once.
_MODEL = """
    --distributed-backend gloo --transformer-impl local --use-mcore-models --bf16 --use-distributed-optimizer
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 192
    --attention-dropout 0.1 --hidden-dropout 0.1
    --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 16
    --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters 2 --clip-grad 1.0 --weight-decay 0.01
    --seed 1234 --split 100,0,0 --num-workers 0 --tokenizer-type NullTokenizer --vocab-size 257
    --make-vocab-size-divisible-by 64 --no-create-attention-mask-in-dataloader
    --log-interval 1 --timing-log-level 0 --eval-iters 0 --eval-interval 1000000 --save-interval 1000000
    --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion
    --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
    --ckpt-format torch_dist --distributed-timeout-minutes 5 --enable-high-availability
"""

# Variables of every job.
SETTINGS = {
    "TTP_OT": "120",
    "TFT_DEVICE": "cpu",
    "CUDA_VISIBLE_DEVICES": "",  # the CPU never stands in for a device that is there
    "OMP_NUM_THREADS": "1",  # four ranks with a thread for every core would fight for the cores
}

_OURS = re.compile(r"TTP_|TFT_|MINDX_|MINDIO_|TORCHELASTIC_|HIGH_AVAILABILITY$|CONTROLLER_ADDR$|PROCESSOR_ADDR$")
_ITERATION = re.compile(r"iteration +(\d+)/ *\d+ \|.*?elapsed time per iteration \(ms\): ([\d.]+).*?lm loss: (\S+) \|")


@dataclass(frozen=True)
class Step:
    """A line of Megatron's training log. loss: as printed, seven digits. seconds: duration of the step."""

    number: int
    loss: str
    seconds: float


@dataclass(frozen=True)
class LogLine:
    """A line of the launcher's JSON log. fields: the whole JSON object."""

    fields: Mapping[str, Any]


Observation = Step | LogLine | Firing


class DemoError(Exception):
    """The demonstration did not go as promised; the message says what was seen and where to look."""


def command(checkpoints: Path, data: Path, steps: int, *, in_place: bool) -> list[str]:
    """The command of a job; see Job for what it takes."""
    return [
        *_ttprun(),
        # Whole lines: around a fault all ranks have something to say, and what they write at once would be mixed.
        *(["--standby", "--tee", "3"] if in_place else []),
        *f"--standalone --nproc-per-node {RANKS}".split(),
        str(Path(__file__).with_name("pretrain_gpt.py")),
        *_MODEL.split(),
        *(IN_PLACE.split() if in_place else []),
        *f"--train-iters {steps} --lr-decay-iters {steps}".split(),
        *("--data-path", str(data), "--load", str(checkpoints), "--save", str(checkpoints)),
    ]


def again(schedule: str, checkpoints: Path, data: Path, steps: int) -> str:
    """What to type to see a job with faults once more, with a report: as a drill.

    Args:
        schedule: as TFT_INJECT has it. checkpoints: folder that does not exist yet, so that training begins anew.
    """
    installed = Path(sys.executable).with_name("mindio-tft")
    program = [str(installed)] if installed.exists() else [sys.executable, "-m", "mindio_tft_patch.cli"]
    variables = [f"{name}={value}" for name, value in SETTINGS.items()]
    words = [*program, "drill", "--faults", schedule, "--compare", "--"]
    return shlex.join([*words, *variables, *command(checkpoints, data, steps, in_place=True)])


class Job:
    """A training job of four ranks on this machine.

    Args:
        folder: output, log and, unless `checkpoints` says otherwise, checkpoints of this job.
        checkpoints: folder that the job loads from and saves to.
        data: prefix of the dataset.
        steps: step at which training ends.
        in_place: faults are repaired while the job stays up, with a stand-by process.
        faults: to happen on purpose, as TFT_INJECT has them.

    Attributes:
        steps_seen: training log by step. lines: the same, whole.
        record: of the last recovery; None: there was none.
        fired: which of the faults have happened.
    """

    def __init__(
        self, folder: Path, *, checkpoints: Path, data: Path, steps: int, in_place: bool = False, faults: str = ""
    ) -> None:
        self.folder = folder
        self.output = folder / "output.txt"
        self.steps_seen: dict[int, Step] = {}
        self.lines: list[Line] = []
        self.fired = FiredFaults(folder / "fired")
        self.record: Mapping[str, Any] | None = None
        self.command = command(checkpoints, data, steps, in_place=in_place)
        self._faults = faults
        self._firings = 0
        self._began = 0.0
        self._logs = folder / "logs"
        self._port = 0
        self._tries = 0
        self._tail = Tail(self.output)
        self._log_tail: Tail | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the launcher; in a session of its own, so that Ctrl-C reaches us first."""
        self.folder.mkdir(parents=True)
        self._launch()

    def _launch(self) -> None:
        self._port = _free_port()
        self._tries += 1
        environ = _environment(self._logs, self._port)
        if self._faults:
            environ |= {VARIABLE: self._faults, STATE_VARIABLE: str(self.folder / "fired")}
        self._began = time.time()
        self._tail = Tail(self.output)
        with self.output.open("wb") as output:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environ,
            )
        self._log_tail = Tail(self._logs / f"ttp_log.jsonl.{self._process.pid}")

    @property
    def code(self) -> int | None:
        """Exit code of the launcher; None while it runs."""
        return None if self._process is None else self._process.poll()

    def observe(self) -> list[Observation]:
        """What has happened since the last call."""
        seen: list[Observation] = []
        for line in self._tail.lines():
            if found := _ITERATION.search(line):
                step = Step(int(found[1]), found[3], float(found[2]) / 1000)
                self.steps_seen[step.number] = step
                seen.append(step)
            if whole := read_line(line, time.time()):
                self.lines.append(whole)
        happened = self.fired.read() if self._faults else []
        seen += happened[self._firings :]
        self._firings = len(happened)
        for line in self._log_tail.lines() if self._log_tail else ():
            fields = json.loads(line)
            if fields.get("record") == "recovery":
                self.record = fields
            seen.append(LogLine(fields))
        return seen

    def watch(self, show: Callable[[Observation], None], until: Callable[[Observation], bool] | None = None) -> bool:
        """Show what happens until the job ends, or until something has happened.

        Returns:
            True when `until` was met, False when the job has ended.
        """
        while True:
            ended = self.code is not None
            met = False
            for observation in self.observe():
                show(observation)
                met = met or (until is not None and until(observation))
            if ended and self._lost_its_port():
                self._launch()
                continue
            if met or ended:
                return met
            time.sleep(0.02)

    def _lost_its_port(self) -> bool:
        """Did the job end before it began, because another program had taken the controller's port meanwhile?"""
        if not self.code or self.steps_seen or self._tries >= _PORT_TRIES:
            return False
        return f"The controller cannot use port {self._port} " in self.output.read_text(errors="replace")

    def kill(self, rank: int) -> int:
        """SIGKILL a rank; returns its process id."""
        assert self._process is not None
        for pid, environ in _children(self._process.pid):
            if environ.get("RANK") == str(rank):
                os.kill(pid, signal.SIGKILL)
                return pid
        raise DemoError(f"there is no process of rank {rank} to kill; see {self.output}")

    def end(self) -> None:
        """End launcher and ranks, whatever they are doing."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        ranks = [pid for pid, _ in _children(process.pid)]
        # The first asks for a checkpoint, the second for the end.
        for _ in range(2):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20.0)
            return
        process.kill()
        process.wait()
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def run(self) -> Run:
        """What a job that has ended did, as a drill sees it."""
        ended = time.time()
        log = read_logs(self._logs, self._began, ended)
        code = self.code
        return Run(self._began, ended, 1 if code is None else code, tuple(self.lines), tuple(log))

    def last_words(self, count: int = 25) -> str:
        """The end of the job's output."""
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-count:])


def _ttprun() -> list[str]:
    installed = Path(sys.executable).with_name("ttprun")
    return [str(installed)] if installed.exists() else [sys.executable, "-m", "mindio_tft_patch.launch.ttprun"]


def _environment(logs: Path, port: int) -> dict[str, str]:
    """This process's environment without what would change the demonstration."""
    kept = {name: value for name, value in os.environ.items() if not _OURS.match(name)}
    return {**kept, **SETTINGS, "TTP_PORT": str(port), "TTP_LOG_PATH": str(logs), "PYTHONUNBUFFERED": "1"}


def _free_port() -> int:
    """A port for the controller, which binds it only after its imports, seconds later.

    Not one that the system gives to whoever opens a connection meanwhile; by chance, because other demonstrations
    choose too. Should it be taken all the same, `Job` tries another one.
    """
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise DemoError(f"no port from {_PORTS[0]} to {_PORTS[-1]} is free on 127.0.0.1.")


def _children(parent: int) -> Iterator[tuple[int, dict[str, str]]]:
    """Process id and environment of each child of a process, from /proc."""
    for one in processes():
        if one.parent == parent:
            with contextlib.suppress(OSError):
                words = (one.folder / "environ").read_bytes().decode(errors="replace").split("\0")
                yield one.pid, dict(word.split("=", 1) for word in words if "=" in word)
