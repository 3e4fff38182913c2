"""The trainer of plain.py with fault tolerance: what has been added is in tolerance.py.

Start it with ttprun and TFT_ADAPTOR=own; TFT_DEVICE=cpu for a machine without accelerator.
"""

from __future__ import annotations

# isort: off
import mindio_tft_patch  # noqa: F401  (first: lets the CPU stand in where TFT_DEVICE=cpu asks for it)

# isort: on
import math
from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist
from checkpoint import folder_of, newest, read_common, read_shards, write_common, write_shard, write_tracker
from data import Batches
from final_state import write_final_state
from megatron.core import parallel_state
from model import build_model
from options import read_options
from random_states import random_states, seed_everything, set_random_states
from sharded_adam import ShardedAdam
from tolerance import Tolerance


class Trainer:
    """Model, optimizer, data and loop of one rank."""

    def __init__(self, options: Namespace, tolerance: Tolerance) -> None:
        self.options = options
        self.tolerance = tolerance
        dist.init_process_group("gloo")
        parallel_state.initialize_model_parallel(options.tensor_parallel)
        seed_everything(options.seed)
        self.group = parallel_state.get_data_parallel_group()
        self.tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        self.model = build_model(options)
        self.optimizer = ShardedAdam(self.model.parameters(), tolerance.shard_group(self.group))
        self.data = Batches(options, self.group.rank(), self.group.size())
        self.step = 0
        self.loss = 0.0

    def train(self) -> None:
        """Train up to the last step."""
        if self.tolerance.resumed:
            self.end_step()
            self.tolerance.resumed = False
        while self.step < self.options.steps:
            with self.tolerance.step():
                self.train_step()
            self.end_step()
        self.tolerance.protection.barrier()

    def train_step(self) -> None:
        """Forward, backward, update."""
        self.model.zero_grad_buffer()
        losses = [self.forward_backward(next(self.data)) for _ in range(self.options.micro_batches)]
        self.model.finish_grad_sync()
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean, group=self.group)
        mean /= self.group.size()
        self.optimizer.prepare(self.options.clip)
        loss = float(mean)
        self.tolerance.gate.commit(self.step + 1, lambda: self.update(loss))
        self.optimizer.gather()

    def forward_backward(self, batch: torch.Tensor) -> torch.Tensor:
        """One micro-batch: [micro_batch, sequence + 1] int64. Returns its loss."""
        places = torch.arange(self.options.sequence, device=batch.device).expand(len(batch), -1)
        loss = self.model(batch[:, :-1], places, None, labels=batch[:, 1:]).float().mean()
        (loss / self.options.micro_batches).backward()
        return loss.detach()

    def update(self, loss: float) -> None:
        """Everything of the step that is this rank's own."""
        self.optimizer.update(self.learning_rate())
        self.loss = loss
        self.step += 1

    def learning_rate(self) -> float:
        """Warm-up, then half a cosine."""
        if self.step < 3:
            return self.options.learning_rate * (self.step + 1) / 3
        return self.options.learning_rate * (0.55 + 0.45 * math.cos(math.pi * self.step / 100))

    def end_step(self) -> None:
        """What follows a step: its line in the log, and a checkpoint where one is due."""
        if dist.get_rank() == dist.get_world_size() - 1 and self.tolerance.logs(self.step):
            print(f" iteration {self.step:8d}/{self.options.steps:8d} | lm loss: {self.loss!r} |", flush=True)
            self.tolerance.marks.logged = self.step
        due = self.step % self.options.save_interval == 0 or self.step == self.options.steps
        if due and self.tolerance.saves(self.step):
            with self.tolerance.saving():
                self.save()

    def save(self) -> None:
        """Write a checkpoint."""
        folder = folder_of(self.options.save, self.step)
        if self.group.rank() < self.optimizer.size:  # one copy of each shard
            write_shard(folder, self.tensor_rank, self.optimizer.position, self.optimizer.size, self.optimizer.state())
        if self.group.rank() == 0:
            write_common(folder, self.tensor_rank, self.state())
        dist.barrier()
        if dist.get_rank() == 0:
            write_tracker(self.options.save, self.step)
        dist.barrier()

    def load(self) -> None:
        """Load the newest checkpoint, if there is one."""
        step = newest(self.options.save)
        if step:
            folder = folder_of(self.options.save, step)
            self.optimizer.load_state(read_shards(folder, self.tensor_rank))
            self.load_state(read_common(folder, self.tensor_rank))
            self.optimizer.gather()

    def state(self) -> dict[str, Any]:
        """Everything but parameters and optimizer."""
        return {"step": self.step, "loss": self.loss, "samples": self.data.consumed, "random": random_states()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Put `state()` back."""
        self.step, self.loss, self.data.consumed = state["step"], state["loss"], state["samples"]
        set_random_states(state["random"])


def main() -> None:
    """Train."""
    options = read_options()
    tolerance = Tolerance(options)
    tolerance.begin()
    trainer = Trainer(options, tolerance)
    if not tolerance.protection.returning:
        trainer.load()
    tolerance.ready(trainer)
    tolerance.protection.run(trainer.train)
    tolerance.protection.finish()
    write_final_state(trainer)


if __name__ == "__main__":
    main()
