"""A rank of NVRx's in-process restart, after its basic_example.py, with one rank in reserve.

RANK=n WORLD_SIZE=5 MASTER_ADDR=host MASTER_PORT=port nvrx_rank.py        (without LOCAL_RANK: there is no GPU)
"""

# No `from __future__ import annotations`, and typing.Optional: the wrapper looks into the annotation of its argument.
import datetime
import logging
import os
from pathlib import Path
from typing import Optional

import torch
from nvidia_resiliency_ext import inprocess

from bench.peers.loop import RANKS, average_gradients, loss_of, make_model, make_optimizer, steps_to_do, write_digest
from bench.step_writer import FOLDER, StepWriter

SAVE_EVERY = 10


@inprocess.Wrapper(
    store_kwargs={"port": int(os.environ["MASTER_PORT"]) + 1},
    rank_assignment=inprocess.Compose(
        inprocess.rank_assignment.MaxActiveWorldSize(RANKS), inprocess.rank_assignment.ShiftRanks()
    ),
)
def train(writer: StepWriter, call_wrapper: Optional[inprocess.CallWrapper] = None) -> None:  # noqa: UP045
    """Train from the last checkpoint; called again after a fault."""
    assert call_wrapper is not None
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model = make_model()
    optimizer = make_optimizer(model)
    store = torch.distributed.TCPStore(
        host_name=os.environ["MASTER_ADDR"],
        port=int(os.environ["MASTER_PORT"]) + 2 + call_wrapper.iteration,
        world_size=world,
        is_master=rank == 0,
        multi_tenant=True,
        wait_for_workers=True,
        use_libuv=True,
    )
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=10)
    )
    checkpoint = Path(os.environ[FOLDER]) / "checkpoint.pt"
    done = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["opt"])
        done = saved["step"]
    for step in range(done + 1, steps_to_do() + 1):
        began = writer.begin(step)
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        average_gradients(model, world)
        optimizer.step()
        writer.end(step, began, rank=rank, world=world)
        if step % SAVE_EVERY == 0:
            torch.distributed.barrier()
            if rank == 0:
                with call_wrapper.atomic():
                    torch.save({"model": model.state_dict(), "opt": optimizer.state_dict(), "step": step}, checkpoint)
    write_digest(rank, model, optimizer)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s | %(levelname)s | %(name)s | %(message)s")
    train(StepWriter(os.environ, int(os.environ["RANK"])))
