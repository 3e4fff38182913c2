"""Apex on the CPU, as far as the Megatron-LM of 2023 uses it; that Megatron imports Apex without asking.

Written against Apex's documented behaviour, in torch's own operations; nothing is fused. What Apex computes in one
kernel for many tensors is computed here tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

Lists = list[list[torch.Tensor]]


class FusedAdam(torch.optim.Optimizer):  # type: ignore[misc]
    """Adam with one integer `step` for each parameter group, as Apex has it.

    Args:
        betas: decay of the running averages of the gradient and of its square.
        eps: added to the denominator.
        adam_w_mode: weight decay acts on the parameter, not on the gradient.
    """

    def __init__(  # noqa: PLR0917  (Apex's own)
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedAdam has no AMSGrad variant; leave amsgrad out.")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode
        self.set_grad_none = set_grad_none

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None if closure is None else closure()
        with torch.no_grad():
            for group in self.param_groups:
                group["step"] = group.get("step", 0) + 1
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        gradient, (first, second), decay = parameter.grad, group["betas"], group["weight_decay"]
        assert gradient is not None
        if decay and not self.adam_w_mode:
            gradient = gradient.add(parameter, alpha=decay)
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.mul_(first).add_(gradient, alpha=1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        step = group["step"] if group["bias_correction"] else None
        corrected_mean = mean if step is None else mean / (1 - first**step)
        corrected_square = square if step is None else square / (1 - second**step)
        update = corrected_mean / (corrected_square.sqrt() + group["eps"])
        if decay and self.adam_w_mode:
            update.add_(parameter, alpha=decay)
        parameter.add_(update, alpha=-group["lr"])


class FusedSGD(torch.optim.SGD):  # type: ignore[misc]
    """Stochastic gradient descent; the same arithmetic as torch's."""


class MultiTensorApply:
    """Calls an operation on lists of tensors."""

    def __call__(self, operation: Callable[..., Any], overflow: torch.Tensor, lists: Lists, *args: Any) -> Any:
        """Return what the operation returns. overflow: [1] int32, set to 1 when a number is not finite."""
        return operation(overflow, lists, *args)


def multi_tensor_l2norm(overflow: torch.Tensor, lists: Lists, per_tensor: bool = False) -> tuple[Any, Any]:
    """Norm over all tensors of the first list: [1] float32; and of each of them, or None."""
    norms = [torch.linalg.vector_norm(tensor.detach(), dtype=torch.float32) for tensor in lists[0]]
    each = torch.stack(norms) if norms else torch.zeros(0)
    return torch.linalg.vector_norm(each).reshape(1), each if per_tensor else None


def multi_tensor_scale(overflow: torch.Tensor, lists: Lists, scale: float) -> None:
    """Write the tensors of the first list times `scale` into those of the second."""
    for source, target in zip(*lists, strict=True):
        if not bool(torch.isfinite(source).all()):
            overflow.fill_(1)
        target.copy_(source if scale == 1.0 else source * scale)


def forward_affine(
    input: torch.Tensor, shape: Iterable[int], weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Layer norm. Returns output, mean and inverse standard deviation, for backward_affine."""
    output, mean, inverse = torch.native_layer_norm(input, list(shape), weight, bias, eps)
    return output, mean, inverse


def backward_affine(  # noqa: PLR0917  (Apex's own)
    gradient: torch.Tensor,
    mean: torch.Tensor,
    inverse: torch.Tensor,
    input: torch.Tensor,
    shape: Iterable[int],
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """Gradients of input, weight and bias."""
    wanted = [True, True, True]
    return tuple(
        torch.ops.aten.native_layer_norm_backward(gradient, input, list(shape), mean, inverse, weight, bias, wanted)
    )
