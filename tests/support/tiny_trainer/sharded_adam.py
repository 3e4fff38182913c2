"""Adam whose state is sharded over a process group (as in ZeRO 1): fp32 main parameters of a bf16 model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate


class ShardedAdam:
    """The optimizer of one rank.

    Args:
        parameters: of the model, each with its reduced gradient in `main_grad`.
        group: over which the state is sharded; its members hold the same parameters.

    Attributes:
        main: [numel / size of the group] float32, this rank's shard of all parameters.
        optimizer: torch's Adam over `main`.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
        self.parameters = list(parameters)
        self.group = group
        self.size, self.position = group.size(), group.rank()
        self.numel = sum(one.numel() for one in self.parameters)
        self._width = -(-self.numel // self.size)
        self.main = torch.nn.Parameter(self._shard_of(one.data for one in self.parameters))
        self.optimizer = torch.optim.AdamW([self.main], weight_decay=0.01)

    def prepare(self, clip: float) -> float:
        """Take over the gradients, clipped to a norm of the whole model. Needs all tensor-parallel ranks.

        Returns:
            Norm of the gradient before it is clipped.
        """
        own = [one.main_grad for one in self.parameters if param_is_not_tensor_parallel_duplicate(one)]
        square = torch.stack([gradient.pow(2).sum() for gradient in own]).sum()
        dist.all_reduce(square, group=parallel_state.get_tensor_model_parallel_group())
        norm = float(square.sqrt())
        self.main.grad = self._shard_of(one.main_grad for one in self.parameters).mul_(min(1.0, clip / (norm + 1e-6)))
        return norm

    def update(self, learning_rate: float) -> None:
        """Update this rank's shard. Needs nobody else."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()

    @torch.no_grad()
    def gather(self) -> None:
        """Bring the updated shards into the model's parameters. Needs the whole group."""
        shards = torch.empty(self.size * self._width, dtype=torch.bfloat16, device=self.main.device)
        dist.all_gather_into_tensor(shards, self.main.detach().bfloat16(), group=self.group)
        start = 0
        for one in self.parameters:
            one.data.copy_(shards[start : start + one.numel()].view_as(one))
            start += one.numel()

    def state(self) -> dict[str, torch.Tensor]:
        """Everything of this shard; before the first update there are no moments."""
        return {"main": self.main.detach(), **self.optimizer.state.get(self.main, {})}

    def load_state(self, shards: list[dict[str, torch.Tensor]]) -> None:
        """Take this rank's part of all shards of a checkpoint, which may have been cut otherwise."""
        whole = {name: self._joined([shard[name] for shard in shards]) for name in shards[0]}
        self.main.data.copy_(whole.pop("main"))
        self.optimizer.state[self.main] = whole

    def _joined(self, parts: list[torch.Tensor]) -> torch.Tensor:
        if parts[0].dim() == 0:  # Adam's count of steps
            return parts[0].clone()
        return self._shard_of([torch.cat(parts)[: self.numel]])

    def _shard_of(self, parts: Iterable[torch.Tensor]) -> torch.Tensor:
        flat = torch.cat([part.reshape(-1).float() for part in parts])
        padded = torch.nn.functional.pad(flat, (0, self.size * self._width - flat.numel()))
        return padded[self.position * self._width :][: self._width].clone()


def every_tensor(optimizer: ShardedAdam) -> Iterator[torch.Tensor]:
    """Parameters of the model and the state of the optimizer."""
    yield from (one.data for one in optimizer.parameters)
    yield from optimizer.state().values()
