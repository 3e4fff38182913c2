"""A rank of torchft: a replica group of one process, with the loop of torchft's README (DDP).

TORCHFT_LIGHTHOUSE=http://host:port RANK=n torchft_rank.py        (RANK: of the job; the group's own is 0)
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from bench.peers.loop import RANKS, loss_of, make_model, make_optimizer, steps_to_do, write_digest
from bench.step_writer import FOLDER, StepWriter


def main() -> None:
    """Train."""
    rank = int(os.environ["RANK"])
    # torchrun would host it; here it is the one process of the group.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model = make_model()
    optimizer = make_optimizer(model)

    def load_state_dict(state: dict) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=lambda: {"model": model.state_dict(), "optim": optimizer.state_dict()},
        replica_id=f"bench_{rank}",
        timeout=timedelta(seconds=30),
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
    )
    wait_for_all(rank)
    ddp = DistributedDataParallel(manager, model)
    protected = Optimizer(manager, optimizer)
    writer = StepWriter(os.environ, rank)
    while manager.current_step() < steps_to_do():
        step = manager.current_step() + 1
        began = writer.begin(step)
        protected.zero_grad()
        loss_of(ddp, step, rank).backward()
        protected.step()
        if manager.current_step() >= step:
            writer.end(manager.current_step(), began, rank=rank, world=manager.num_participants())
    write_digest(rank, model, optimizer)
    manager.shutdown(wait=False)


def wait_for_all(rank: int) -> None:
    """Have all replicas known to the lighthouse before the first step, so that all of them take part in it."""
    folder = Path(os.environ[FOLDER])
    (folder / f"made-{rank}").touch()
    while len(list(folder.glob("made-*"))) < RANKS:
        time.sleep(0.01)
    time.sleep(0.5)


if __name__ == "__main__":
    main()
    os._exit(0)  # threads of the store and of the manager's server are still there
