"""A framework of its own on plain torch and gloo, protected by the functions of the SDK alone: `import mindio_ttp`.

    sdk_gloo_job.py --steps 12 --save DIR --fault kill:1:4 --fault uce:1:7 --fault error:0:10

Every rank holds all of a small model; its callbacks do what docs/sdk.md says that callbacks do. Each fault happens once
in the whole job. Every rank writes a line when something happens to it; the state is a function of the step alone.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SIZE = 257
GROUP_SECONDS = 20.0
STEP_SECONDS = 0.05  # a process that dies at once has not told the controller that it trains


def say(text: str) -> None:
    sys.stdout.write(f"rank {os.environ.get('RANK', '?')}: {text}\n")
    sys.stdout.flush()


class Model:
    """Parameters and momentum; the optimizer is four lines."""

    def __init__(self) -> None:
        self.weights = torch.linspace(-1.0, 1.0, SIZE)
        self.momentum = torch.zeros(SIZE)

    def gradient(self, rank: int, step: int) -> torch.Tensor:
        return torch.sin(self.weights * (rank + 1) + step)

    def update(self, gradient: torch.Tensor) -> None:
        self.momentum.mul_(0.9).add_(gradient)
        self.weights.sub_(self.momentum, alpha=0.01)

    def digest(self) -> str:
        return hashlib.sha256(self.weights.numpy().tobytes() + self.momentum.numpy().tobytes()).hexdigest()[:16]


def reference(world_size: int, steps: int) -> Model:
    """What an undisturbed training ends with."""
    model = Model()
    for step in range(1, steps + 1):
        model.update(torch.stack([model.gradient(rank, step) for rank in range(world_size)]).sum(0))
    return model


class Group:
    """A gloo group whose waits can be ended, and that can be made anew."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self.rank, self.size = store, rank, size
        self._old: list[Any] = []  # their destructors wait for collectives that are stuck
        self._group: Any = None
        self.stopped = threading.Event()

    def connect(self, name: str) -> None:
        if self._group is not None:
            self._old.append(self._group)
        store = dist.PrefixStore(name, self._store)
        self._group = dist.ProcessGroupGloo(store, self.rank, self.size, timedelta(seconds=GROUP_SECONDS))

    def sum(self, tensor: torch.Tensor) -> None:
        self._wait(self._group.allreduce([tensor]))

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        self._group.send([tensor], rank, 0).wait()

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        self._group.recv([tensor], rank, 0).wait()

    def _wait(self, work: Any) -> None:
        while not work.is_completed():
            if self.stopped.wait(0.001):
                raise RuntimeError("FORCE STOP by the stop callback")
        work.wait()


class Trainer:
    """The framework."""

    def __init__(self, options: argparse.Namespace, ttp: Any) -> None:
        self.options, self.ttp = options, ttp
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.store = dist.TCPStore(host, port, None, False, timedelta(seconds=60))
        self.group = Group(self.store, self.rank, self.size)
        self.returned = False
        self.recoveries = 0

    def start(self) -> None:
        ttp = self.ttp
        repairs, reboots = self.options.enable_hbmfault_repair, self.options.enable_worker_reboot
        if self.rank == 0:
            ttp.tft_init_controller(self.rank, self.size, False, reboots)
            ttp.tft_start_controller("127.0.0.1", 8000, False, "")
        ttp.tft_init_processor(self.rank, self.size, False, False, "", repairs, reboots)
        ttp.tft_start_processor("127.0.0.1", 8000)
        self.returned = ttp.tft_is_reboot_node()
        everybody = {"rank_list": list(range(self.size)), "replica_cnt": self.size, "replica_shift": 0}
        ttp.tft_set_optimizer_replica(self.rank, [everybody])
        ttp.tft_register_stop_handler(self.on_stop)
        ttp.tft_register_clean_handler(self.on_clean)
        ttp.tft_register_rebuild_group_handler(self.on_rebuild)
        ttp.tft_register_repair_handler(self.on_repair)
        ttp.tft_register_rollback_handler(self.on_rollback)
        ttp.tft_register_save_ckpt_handler(self.on_save)
        ttp.tft_register_rename_handler(self.on_rename)
        if not self.returned:
            self.group.connect("first")

    def train(self, state: list[Any], steps: list[int]) -> int:
        if self.returned:
            say("has come back")
            raise RuntimeError("ARF FINISH")
        model: Model = state[0]
        while steps[0] < self.options.steps:
            step = steps[0] + 1
            time.sleep(STEP_SECONDS)
            self.fail_if_due(step)
            gradient = model.gradient(self.rank, step)
            self.group.sum(gradient)
            self.ttp.tft_start_updating_os()
            model.update(gradient)
            self.ttp.tft_end_updating_os(step)
            steps[0] = step
            say(f"step {step} {model.digest()}")
            self.ttp.tft_pause_train(step)
        return steps[0]

    def fail_if_due(self, step: int) -> None:
        for fault in self.options.fault:
            kind, rank, when = fault.split(":")
            if (self.rank, step) != (int(rank), int(when)) or not self._first(fault):
                continue
            say(f"fails: {fault}")
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("UCE ERROR") if kind == "uce" else ValueError("broken by the test")

    def _first(self, fault: str) -> bool:
        try:
            (self.options.save / f"happened-{fault}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    # Callbacks; the training thread waits meanwhile.

    def on_stop(self, args: list[Any], ctx: Any) -> None:
        self.group.stopped.set()

    def on_clean(self, is_uce_error: bool, args: list[Any], ctx: Any) -> int:
        self.group.stopped.clear()
        say(f"clean for {self.ttp.tft_get_repair_type()}, memory error: {is_uce_error}")
        if self.ttp.tft_get_repair_type() == "retry":
            self._connect()
        return 0

    def on_rebuild(self, fault_ranks: list[int], args: list[Any], ctx: Any) -> None:
        say(f"rebuild without {fault_ranks}")
        self._connect()

    def _connect(self) -> None:
        # The same number on every rank, also on one that was not there before.
        self.recoveries = int(self.store.add("sdk/connections", 1) - 1) // self.size
        self.group.connect(f"recovery-{self.recoveries}")

    def on_repair(  # noqa: PLR0917 - as documented
        self, step: int, need_rebuild: bool, ranks: list[int], info: Any, args: list[Any], ctx: Any
    ) -> None:
        say(f"repair {info['repair_type']} from {info['src']} to {info['dst']}")
        if need_rebuild:
            args[0][0] = Model()
        model: Model = args[0][0]
        for source, target in zip(info["src"], info["dst"], strict=True):
            for tensor in (model.weights, model.momentum):
                if self.rank == source:
                    self.group.send(tensor, target)
                else:
                    self.group.receive(tensor, source)

    def on_rollback(self, step: int, args: list[Any], ctx: Any) -> None:
        say(f"rollback to {step}")
        args[1][0] = step
        self.returned = False

    def on_save(self, step: int, save_info: list[Any], args: list[Any], ctx: Any) -> None:
        say(f"saves {save_info} on {threading.current_thread().name}")
        folder = self.options.save / f"step_{step}_tmp"
        folder.mkdir(exist_ok=True)
        model: Model = args[0][0]
        torch.save({"weights": model.weights, "momentum": model.momentum}, folder / f"rank_{self.rank}.pt")

    def on_rename(self, step: int, args: list[Any]) -> Path:
        target = self.options.save / f"step_{step}"
        (self.options.save / f"step_{step}_tmp").rename(target)
        return target


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--save", type=Path, required=True)
    parser.add_argument("--fault", action="append", default=[])
    for flag in ("high-availability", "worker-reboot", "hbmfault-repair"):
        parser.add_argument(f"--enable-{flag}", action="store_true")  # read by ttprun too
    options = parser.parse_args()
    # Where the project is installed, a line in a .pth file does what this import does for the old names; but an import
    # with these flags would look for a Megatron to patch.
    sys.argv = sys.argv[:1]
    import mindio_tft_patch  # noqa: F401, I001 - before the next line, which it makes possible
    import mindio_ttp.framework_ttp as ttp  # type: ignore[import-not-found]

    trainer = Trainer(options, ttp)
    trainer.start()
    state, steps = [Model()], [0]
    done = ttp.tft_exception_handler(trainer.train)(state, steps)
    say(f"done after {done} with {state[0].digest()}")
    sys.stdout.flush()
    os._exit(0)  # groups with collectives that are stuck would wait for them


if __name__ == "__main__":
    main()
