"""Megatron's distributed optimizer over torch's own Adam.

Without Transformer Engine and Apex, which need a GPU, Megatron falls back on torch.optim.Adam(W). That trains, but
saving and loading its state was written for their FusedAdam, which keeps one `step` a group; torch's Adam keeps
a tensor `step` for each parameter. Three methods of DistributedOptimizer trip over it, in core_v0.12.1 and 0.19.2
alike; a resumed run would end in an assertion, in a KeyError, or silently in a wrong bias correction.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from mindio_tft_patch.adaptors.device.cpu_registry import Registry


def correct(registry: Registry, module: ModuleType) -> None:
    """Correct `DistributedOptimizer` in `megatron.core.optimizer.distrib_optimizer`."""
    if getattr(module, "HAVE_APEX_OR_TE", True):
        return
    optimizer = module.DistributedOptimizer
    for name, wrap in (
        ("state_dict", _with_state),
        ("load_state_dict", _with_own_steps),
        ("_set_main_param_and_optimizer_states", _with_step),
    ):
        original = vars(optimizer)[name]
        if not hasattr(original, "_tft_cpu_stand_in"):
            wrapped = wrap(original)
            wrapped._tft_cpu_stand_in = True  # type: ignore[attr-defined]
            registry.set(optimizer, name, wrapped)


def _with_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """`state_dict` before the first step, as in every load: it asserts that some parameter has a step.

    Give every parameter what Adam's first step would give it: step 0 and zero moments.
    """

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.optimizer, torch.optim.Adam) and not self.optimizer.state:
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    self.optimizer.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
        return original(self, *args, **kwargs)

    return wrapper


def _with_own_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    """`load_state_dict` hands one and the same tensor to all parameters, and Adam adds one for each of them."""

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if isinstance(self.optimizer, torch.optim.Adam):
            for state in self.optimizer.state.values():
                if isinstance(state.get("step"), torch.Tensor):
                    state["step"] = state["step"].clone()
        return result

    return wrapper


def _with_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """`_set_main_param_and_optimizer_states` finds no step in the loaded tensors, or one from before the load.

    The right one came with the group and is in place by now: put that one in, to be copied onto itself. And without
    mixed precision the main parameters are views of the model's, into which nothing may be copied under autograd.
    """

    @functools.wraps(original)
    def wrapper(self: Any, model_param: Any, tensors: dict[str, Any]) -> Any:
        if isinstance(self.optimizer, torch.optim.Adam):
            group_index, group_order = self.model_param_group_index_map[model_param]
            state = self.optimizer.state[self.optimizer.param_groups[group_index]["params"][group_order]]
            if "step" in state:
                tensors = {**tensors, "step": state["step"]}
        with torch.no_grad():
            return original(self, model_param, tensors)

    return wrapper
