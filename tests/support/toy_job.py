"""A tiny job for the launcher's tests: no Megatron; with `--plugin` its ranks speak to the controller.

    toy_job.py --steps 20 --die 1:5:SIGKILL          plain: rank 1 kills itself at step 5
    toy_job.py --plugin --enable-high-availability   ranks register, obey the controller, "dump" a small file
    toy_job.py --plugin --enable-high-availability --enable-worker-reboot
                                                     ranks offer respawn too; each --die happens once in the whole job
    toy_job.py --plugin --enable-high-availability --enable-hbmfault-repair
                                                     likewise retry

Every rank writes the numbers of its steps to standard output, flushed.
"""

from __future__ import annotations

import argparse
import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

STEP_SECONDS = 0.05


def say(text: str) -> None:
    """A line in one write: print() makes two of it, and lines of several ranks would mingle."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--die", default="", help="list of rank:step:SIGNAL, rank:step:<exit code>, raise, memory")
    parser.add_argument("--attempts", type=int, default=1, help="attempts in which --die happens")
    parser.add_argument("--plugin", action="store_true")
    parser.add_argument("--gloo", action="store_true", help="meet in a real process group and reduce once")
    parser.add_argument("--stubborn", type=int, default=-1, help="this rank never obeys and ignores SIGTERM")
    parser.add_argument("--child", action="store_true", help="start a child, as a data loader does")
    parser.add_argument("--record", action="store_true", help="write torchelastic's error file")
    parser.add_argument("--save", type=Path, default=None)
    parser.add_argument("--enable-high-availability", action="store_true")
    parser.add_argument("--enable-worker-reboot", action="store_true")
    parser.add_argument("--enable-hbmfault-repair", action="store_true")
    parser.add_argument("--broken", default="", help="rank:phase: this phase always fails on this rank")
    return parser.parse_args()


def die_if_due(options: argparse.Namespace, rank: int, step: int) -> None:
    if not options.die or int(os.environ["TORCHELASTIC_RESTART_COUNT"]) >= options.attempts:
        return
    for one in options.die.split(","):
        who, when, how = one.split(":")
        if (rank, step) == (int(who), int(when)) and first_time(options, one):
            die(how)


def first_time(options: argparse.Namespace, what: str) -> bool:
    """A process that takes the place of a dead one must not die of the same."""
    if not options.enable_worker_reboot and not options.enable_hbmfault_repair:
        return True
    try:
        (options.save / f"happened-{what}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def die(how: str) -> None:
    if how == "raise":
        raise RuntimeError("the toy job was told to raise")
    if how == "memory":
        raise RuntimeError("UCE ERROR: the toy job was told to have a memory error")
    if how.isdecimal():
        sys.stdout.flush()
        os._exit(int(how))
    os.kill(os.getpid(), getattr(signal, how))


def meet() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert int(ones.item()) == dist.get_world_size()


class ToyHandlers:
    """Phases of a job without state."""

    def __init__(self, options: argparse.Namespace, rank: int, world_size: int, stop: threading.Event) -> None:
        from mindio_tft_patch.processor.progress import ProgressBoard
        from mindio_tft_patch.protocol.messages import ReplicaSet

        self.options, self.rank, self.stopping = options, rank, stop
        self.board = ProgressBoard()
        self.sets = (ReplicaSet("dense", tuple(range(world_size))),)
        self.meetings = "first"  # a name of their own for the gates after each recovery

    def replica_sets(self):
        return self.sets

    def strategies(self):
        from mindio_tft_patch.protocol.phases import Strategy

        found = [Strategy.RETRY] if self.options.enable_hbmfault_repair else []
        found += [Strategy.RESPAWN] if self.options.enable_worker_reboot else []
        return (*found, Strategy.DUMP)

    def commit_state(self):
        return self.board.commit

    def stop(self) -> None:
        self.stopping.set()

    def arrived(self) -> None:
        self.stopping.clear()

    def clean(self, plan):
        from mindio_tft_patch.processor.handlers import Outcome
        from mindio_tft_patch.protocol.messages import CommitState

        if self.board.commit.at_gate == plan.target_step:
            self.board.set_commit(CommitState(step=plan.target_step))
        return Outcome()

    def rebuild(self, plan):
        from mindio_tft_patch.processor.handlers import Outcome

        if self.options.broken == f"{self.rank}:rebuild":
            raise RuntimeError("the toy job was told to fail here")
        return Outcome()

    def repair(self, plan):
        from mindio_tft_patch.processor.handlers import Outcome

        return Outcome()

    pause = repair

    def rollback(self, plan):
        from mindio_tft_patch.processor.handlers import Outcome
        from mindio_tft_patch.protocol.messages import CommitState

        self.board.set_commit(CommitState(step=plan.target_step))
        return Outcome()

    def resume(self, plan):
        from mindio_tft_patch.processor.handlers import Outcome

        self.meetings = f"attempt {self.attempt()}"
        return Outcome()

    def dump(self, plan):
        from mindio_tft_patch.processor.handlers import Outcome

        path = self.options.save / f"iter_{plan.target_step:07d}"
        path.mkdir(parents=True, exist_ok=True)
        (path / f"rank_{self.rank}").write_text("saved")
        return Outcome(detail=str(path))


def wait_for_all(store, world_size: int) -> None:
    store.add("toy/ready", 1)
    while int(store.add("toy/ready", 0)) < world_size:
        time.sleep(0.02)


def controller_of(config, store):
    from mindio_tft_patch.protocol.endpoint import fetch
    from mindio_tft_patch.protocol.keys import external_endpoint

    return external_endpoint(config) if config.controller_of_cluster else fetch(store)


def be_stubborn() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(0.1)


def run_plugin(options: argparse.Namespace, rank: int, world_size: int) -> None:
    # The import would patch Megatron when it sees the flag; there is no Megatron in this job.
    sys.argv = [word for word in sys.argv if not word.startswith("--enable-")]
    from mindio_tft_patch.adaptors.job_store import open_job_store
    from mindio_tft_patch.adaptors.orphans import die_with_parent
    from mindio_tft_patch.config import process_config
    from mindio_tft_patch.errors import Interrupted
    from mindio_tft_patch.processor.client import Client
    from mindio_tft_patch.processor.guard import Guard
    from mindio_tft_patch.protocol.messages import CommitState, Ready
    from mindio_tft_patch.protocol.phases import Activity

    die_with_parent()
    say(f"rank {rank} is process {os.getpid()}")
    stop = threading.Event()
    handlers = ToyHandlers(options, rank, world_size, stop)
    config = process_config(os.environ)
    store = open_job_store(config, 60.0)
    client = Client(
        config,
        controller_of(config, store),
        handlers.board,
        rank=rank,
        world_size=world_size,
        on_stop=handlers.stop,
    )
    handlers.attempt = lambda: client.attempt
    client.start()
    atexit.register(client.close)
    client.ready(Ready(rank, 0, handlers.sets, handlers.strategies()))
    returning = [True] if client.returning else []
    if not returning:
        wait_for_all(store, world_size)
    say(f"rank {rank} {'returns' if returning else 'ready'}")
    if options.stubborn == rank:
        be_stubborn()

    def body() -> None:
        if returning:
            returning.clear()
            raise Interrupted
        handlers.board.enter(Activity.COMPUTE)
        for step in range(handlers.board.commit.step + 1, options.steps + 1):
            guard.boundary(step - 1)
            die_if_due(options, rank, step)
            time.sleep(STEP_SECONDS)
            handlers.board.set_commit(CommitState(step=step - 1, at_gate=step))
            # The commit gate: as in a real job no rank is ever more than one step ahead.
            gate = f"toy/gate/{handlers.meetings}/{step}"
            store.add(gate, 1)
            with handlers.board.in_collective():
                while int(store.add(gate, 0)) < world_size:
                    if stop.is_set():
                        raise Interrupted
                    time.sleep(0.01)
            handlers.board.set_commit(CommitState(step=step))
            say(f"rank {rank} step {step}")
            if stop.is_set():
                raise Interrupted
        client.finished()

    guard = Guard(client, handlers, handlers.board, patience_seconds=60.0 if options.enable_worker_reboot else 15.0)
    guard.run(body)


def main() -> None:
    options = arguments()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if options.child:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
        say(f"child {child.pid}")
    if options.gloo:
        meet()
    if options.plugin:
        run_plugin(options, rank, world_size)
    else:
        for step in range(1, options.steps + 1):
            die_if_due(options, rank, step)
            time.sleep(STEP_SECONDS)
    say(f"rank {rank} done attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}")


if __name__ == "__main__":
    if "--record" in sys.argv:  # the file with the error, as torchelastic's own decorator writes it
        from torch.distributed.elastic.multiprocessing.errors import record

        main = record(main)
    main()
