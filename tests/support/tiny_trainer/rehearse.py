"""The contract test of the tiny trainer: all ranks rehearse recoveries in the middle of training, then train on.

Started like train.py.
"""

from __future__ import annotations

# isort: off
import mindio_tft_patch  # noqa: F401  (first: lets the CPU stand in where TFT_DEVICE=cpu asks for it)

# isort: on
import random
from typing import Any

import torch
import torch.distributed as dist
from final_state import state_digests, write_final_state
from options import read_options
from sharded_adam import every_tensor
from tolerance import Tolerance
from train import Trainer

from mindio_tft_patch.testing import Rehearsal, check_handlers


def rehearsal_of(trainer: Trainer, tolerance: Tolerance) -> Rehearsal:
    """What the rehearsal needs of this trainer."""

    def spoil() -> None:
        for tensor in every_tensor(trainer.optimizer):
            tensor.fill_(float("nan"))
        for group in trainer.optimizer.optimizer.param_groups:
            group["lr"] = 0.0

    def advance() -> None:
        next(trainer.data)
        random.random()
        torch.rand(1)
        trainer.step += 1

    def gather(value: Any) -> list[Any]:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, value)
        return everyone

    def step() -> None:
        with tolerance.step():
            trainer.train_step()
        trainer.end_step()

    return Rehearsal(
        state=lambda: state_digests(trainer),
        spoil=spoil,
        advance=advance,
        begin=tolerance.protection.rehearse,
        gather=gather,
        step=step,
        board=tolerance.board,
        dumps=True,
    )


def main() -> None:
    """Train, rehearse after the second step, train on."""
    options = read_options()
    tolerance = Tolerance(options)
    tolerance.begin()
    trainer = Trainer(options, tolerance)
    check_handlers(tolerance, rank=tolerance.rank)  # before ready(): what fails here ends the job, and nothing is saved
    tolerance.ready(trainer)
    steps, options.steps = options.steps, 2
    trainer.train()
    handlers, rehearsal = tolerance.protection.handlers, rehearsal_of(trainer, tolerance)
    # In run(): what fails there ends the job, and is no lost process that would be started anew.
    tolerance.protection.run(lambda: check_handlers(handlers, rank=tolerance.rank, rehearsal=rehearsal))
    print(f"rank {tolerance.rank}: the handlers keep the contract", flush=True)
    tolerance.resumed = False
    options.steps = steps
    tolerance.protection.run(trainer.train)
    tolerance.protection.finish()
    write_final_state(trainer)


if __name__ == "__main__":
    main()
