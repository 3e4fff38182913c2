"""The state of one torch optimizer on one rank: what it updates, its state, the scalars of its groups.

Written against torch's optimizer interface alone (`param_groups`, `state`), so that any optimizer that follows it is
served. What is a tensor is sent as bytes; everything else, scalars of the groups included, as it is.

None in place of an optimizer: this rank has no share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from mindio_tft_patch.adaptors.porting.transfer import receive_object, receive_tensors, send_object, send_tensors


@dataclass(frozen=True)
class _TensorForm:
    """A tensor without its content."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    on_host: bool

    def make(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="cpu" if self.on_host else like.device)


@dataclass
class _Description:
    """groups: the scalars of each group. states: the state of each parameter, tensors by their form."""

    groups: list[dict[str, Any]] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """What the optimizer updates on this rank, in a fixed order."""
    if optimizer is None:
        return []
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def tensors_of(optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the state, with a name that is the same on all holders."""
    for number, parameter in enumerate(parameters_of(optimizer)):
        yield f"{number}/parameter", parameter
        for name, value in sorted(_state(optimizer, parameter).items()):
            if isinstance(value, torch.Tensor):
                yield f"{number}/{name}", value


def send_optimizer(optimizer: Any, target: int) -> int:
    """Send the state of an optimizer to a rank that holds the same shard. Returns the bytes sent."""
    send_object(_describe(optimizer), target)
    return send_tensors([tensor for _, tensor in tensors_of(optimizer)], target)


def receive_optimizer(optimizer: Any, source: int) -> int:
    """Take over the state of an optimizer, whatever this rank had. Returns the bytes received.

    Raises:
        ValueError: the two ranks do not hold the same shard.
    """
    description: _Description = receive_object(source)
    parameters = parameters_of(optimizer)
    if [tuple(one.shape) for one in parameters] != description.shapes:
        raise ValueError(f"rank {source} holds parameters of other shapes; it is no partner of this rank")
    if optimizer is None:
        return 0
    for group, scalars in zip(optimizer.param_groups, description.groups, strict=True):
        for name in [name for name in group if name != "params" and name not in scalars]:
            del group[name]
        group.update(scalars)
    for parameter, state in zip(parameters, description.states, strict=True):
        _take_form(optimizer, parameter, state)
    return receive_tensors([tensor for _, tensor in tensors_of(optimizer)], source)


def _describe(optimizer: Any) -> _Description:
    parameters = parameters_of(optimizer)
    groups = [] if optimizer is None else optimizer.param_groups
    return _Description(
        groups=[{name: value for name, value in group.items() if name != "params"} for group in groups],
        states=[{name: _form(value) for name, value in _state(optimizer, one).items()} for one in parameters],
        shapes=[tuple(one.shape) for one in parameters],
    )


def _state(optimizer: Any, parameter: torch.Tensor) -> dict[str, Any]:
    # `state` is a defaultdict: get() makes no entry.
    found: dict[str, Any] = optimizer.state.get(parameter, {})
    return found


def _form(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return _TensorForm(value.dtype, tuple(value.shape), value.device.type == "cpu")


def _take_form(optimizer: Any, parameter: torch.Tensor, description: dict[str, Any]) -> None:
    """Make the state of one parameter hold exactly what is described; tensors that fit are kept."""
    state = _state(optimizer, parameter)
    for name in [name for name in state if name not in description]:
        del state[name]
    for name, value in description.items():
        if not isinstance(value, _TensorForm):
            optimizer.state[parameter][name] = value
            continue
        present = state.get(name)
        fits = isinstance(present, torch.Tensor) and _form(present) == value and present.is_contiguous()
        if not fits:
            optimizer.state[parameter][name] = value.make(parameter)
