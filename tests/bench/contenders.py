"""Who is compared: how each starts its job of four ranks, and how the end of two jobs is compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.final_state import differences
from support.jobs import FLAG, free_port
from support.tiny_gpt import tiny_gpt_args

from bench.family import Family
from bench.peers.names import STEPS
from bench.recovery_log import records
from bench.step_writer import HOLD_BEFORE
from mindio_tft_patch.launch.reserve import BECOMES

RANKS, ITERATIONS, SAVE_EVERY = 4, 20, 10
# Steps from here on are those in which somebody dies. All wait before the first of them until everything is ready.
HELD = SAVE_EVERY + 1
FLAGS = (FLAG, "--enable-worker-reboot", "--enable-hbmfault-repair")
PEERS = "TFT_BENCH_PEERS"

_HERE = Path(__file__).parent
_NEVER = 10**7
# What Megatron saves at a restart for some ranks only, and nothing draws from (support/compare.py).
_NOT_COMPARED = "rng/tracker/expert-parallel-rng"


class Contender:
    """A way to survive the loss of a rank.

    Attributes:
        name: in bench.json.
        what: for people.
        install: what to do when it is not there.
        version: of a peer.
    """

    name = ""
    what = ""
    install = ""
    version = ""

    @property
    def like(self) -> str:
        """Name of the contender whose unbroken job must end the same; by default its own."""
        return self.name

    def misses(self, log: Sequence[Mapping[str, Any]]) -> str:
        """What its recovery should have been and was not, by the plugin's log; empty: all is well."""
        return ""

    def available(self) -> bool:
        """It can be started here."""
        return True

    def launch(self, folder: Path, environ: Mapping[str, str] = {}) -> Family:
        """Start a job."""
        raise NotImplementedError

    def idle_helper(self) -> str:
        """Part of the command line of a process that must have made itself ready before the fault; empty: none."""
        return ""

    def ends(self, killed: bool) -> int:
        """How many ranks come to the end of the training and leave a file there."""
        return RANKS

    def end_files(self, folder: Path) -> list[Path]:
        """What the ranks leave at the end of the training."""
        raise NotImplementedError

    def unlike(self, one: Path, other: Path) -> list[str]:
        """What the ends of two jobs do not have in common, bit by bit."""
        raise NotImplementedError

    def _family(self, folder: Path, environ: Mapping[str, str]) -> Family:
        variables = {"OMP_NUM_THREADS": "1", HOLD_BEFORE: str(HELD), STEPS: str(ITERATIONS)}
        return Family(folder, {**variables, **environ})


class _Megatron(Contender):
    """Real Megatron: the tiny GPT of the tests, 4 data-parallel ranks."""

    flags: Sequence[str] = ()
    options: Sequence[str] = ()
    launcher = ""
    save_every = _NEVER

    def launch(self, folder: Path, environ: Mapping[str, str] = {}) -> Family:
        """Start a job."""
        save = str(folder / "save")
        gpt = {"train_iters": ITERATIONS, "save": save, "load": save, "save_interval": self.save_every}
        arguments = [*tiny_gpt_args(data_prefix=None, eval_interval=_NEVER, **gpt), *self.flags]  # type: ignore[arg-type]
        family = self._family(folder, {"TTP_PORT": str(free_port()), "TTP_LOG_PATH": str(folder / "logs"), **environ})
        logs = ["--log-dir", str(folder / "out"), "--redirects", "3"]
        shared = ["--standalone", "--nproc-per-node", str(RANKS), *logs]
        launcher = Path(sys.executable).with_name(self.launcher)
        family.start("launcher", [launcher, *self.options, *shared, _HERE / "timed_rank.py", *arguments])
        return family

    def end_files(self, folder: Path) -> list[Path]:
        """Final states; Megatron's last save comes after that."""
        return sorted(folder.glob("state-*.json"))

    def unlike(self, one: Path, other: Path) -> list[str]:
        """Names of what differs in the final states."""
        states = [
            {path.name: json.loads(path.read_text()) for path in self.end_files(folder)} for folder in (one, other)
        ]
        if len(states[0]) != RANKS or set(states[0]) != set(states[1]):
            return [f"final states: {sorted(states[0])} and {sorted(states[1])}"]
        return [
            f"{name}: {key}"
            for name in states[0]
            for key in differences(states[0][name], states[1][name])
            if key != _NOT_COMPARED
        ]


class Ours(_Megatron):
    """ttprun; a lost rank is started again from a new interpreter."""

    name, what, launcher, flags = "ours", "mindio_tft_patch", "ttprun", FLAGS

    @property
    def like(self) -> str:
        """A stand-by makes no difference to an unbroken job."""
        return Ours.name

    def misses(self, log: Sequence[Mapping[str, Any]]) -> str:
        """One restart of one rank is expected."""
        found = [str(record["strategy"]) for record in records(log)]
        return "" if found == ["respawn"] else f"recoveries: {found}"


class OursStandby(Ours):
    """ttprun --standby."""

    name, what, options = "ours_standby", "mindio_tft_patch with a stand-by", ("--standby",)

    def idle_helper(self) -> str:
        """The stand-by."""
        return "mindio_tft_patch.launch.standby"

    def misses(self, log: Sequence[Mapping[str, Any]]) -> str:
        """The stand-by must have been used."""
        before, _, after = BECOMES.removesuffix("%s").partition("%d")
        messages = [str(line.get("message")) for line in log]
        used = any(message.startswith(before) and after in message for message in messages)
        return super().misses(log) or ("" if used else "the stand-by was not used")


class Torchrun(_Megatron):
    """torchrun ends all ranks and starts them again; Megatron loads the last checkpoint."""

    name, what, launcher = "torchrun", f"torchrun, checkpoint every {SAVE_EVERY} steps", "torchrun"
    options, save_every = ("--max-restarts", "3"), SAVE_EVERY

    def launch(self, folder: Path, environ: Mapping[str, str] = {}) -> Family:
        """Start a job. With torch 2.14 on gloo, its restarts fail if ranks share the launcher's store."""
        return super().launch(folder, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **environ})


class _Peer(Contender):
    """Another project, in an environment of its own, with the loop of peers/loop.py."""

    module, requirement = "", ""
    install = f"pip install torch {{0}} into an environment of its own, then {PEERS}=/path/to/bin/python make bench"

    def __init__(self) -> None:
        self.python = os.environ.get(PEERS, "")
        self.install = self.install.format(self.requirement)
        self.version = self._find_version() if self.python else ""

    def available(self) -> bool:
        """Its module can be imported there."""
        return bool(self.version)

    def _find_version(self) -> str:
        script = f"import {self.module}, importlib.metadata as m; print(m.version('{self.requirement}'))"
        found = subprocess.run([self.python, "-c", script], check=False, capture_output=True, text=True, timeout=120.0)
        return found.stdout.strip() if found.returncode == 0 else ""

    def end_files(self, folder: Path) -> list[Path]:
        """Digests."""
        return sorted(folder.glob("digest-?"))

    def unlike(self, one: Path, other: Path) -> list[str]:
        """Ranks whose digests differ, or of which one has none."""
        ends = [{path.name: path.read_text() for path in self.end_files(folder)} for folder in (one, other)]
        return differences(*ends)

    def _rank(self, family: Family, rank: int, environ: Mapping[str, str]) -> None:
        variables = {"RANK": str(rank), "PYTHONPATH": str(_HERE.parent), **environ}
        family.start(f"rank-{rank}", [self.python, _HERE / "peers" / f"{self.name}_rank.py"], variables)


class NVRx(_Peer):
    """NVIDIA Resiliency Extension: in-process restart."""

    name, what = "nvrx", f"NVRx in-process, one rank in reserve, checkpoint every {SAVE_EVERY} steps"
    module, requirement = "nvidia_resiliency_ext.inprocess", "nvidia-resiliency-ext"

    def launch(self, folder: Path, environ: Mapping[str, str] = {}) -> Family:
        """Start a job."""
        family = self._family(folder, environ)
        family.environ.pop("LOCAL_RANK", None)
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS + 1)}
        for rank in range(RANKS + 1):
            self._rank(family, rank, where)
        return family


class TorchFT(_Peer):
    """torchft: the other replicas go on with a smaller quorum."""

    name, what = "torchft", "torchft, 4 replica groups of one rank"
    module, requirement = "torchft", "torchft-nightly"

    def ends(self, killed: bool) -> int:
        """Nobody takes the place of the lost rank."""
        return RANKS - killed

    def launch(self, folder: Path, environ: Mapping[str, str] = {}) -> Family:
        """Start a job."""
        family = self._family(folder, environ)
        port = free_port()
        options = ["--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
        lighthouse = Path(self.python).with_name("torchft_lighthouse")
        family.start("lighthouse", [lighthouse, *options, "--bind", f"[::]:{port}"], serves=True)
        for rank in range(RANKS):
            self._rank(family, rank, {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"})
        return family


def contenders() -> list[Contender]:
    """All of them."""
    return [Ours(), OursStandby(), Torchrun(), NVRx(), TorchFT()]
