"""What the Megatron-LM of 2023 (megatron/training.py is a file there) needs beyond the CPU stand-in.

It was written for the torch, numpy and Apex of its time and imports them without asking. Nothing here is installed
where another Megatron is found, and nothing takes the place of a package that is there.

| what | why |
|---|---|
| apex, amp_C, fused_mix_prec_layer_norm_cuda | imported at once; see `cpu_legacy_apex.py` |
| torch._six | for `inf`; torch 2 has removed it |
| TypedStorage._untyped | made public as `untyped` |
| torch.load, weights_only | its checkpoints hold Python objects; torch 2.6 made refusing them the default |
| torch.jit.script | identity: the interpreter of TorchScript is on its way out, and nothing is fused on a CPU |
| _all_gather_base, _reduce_scatter_base | are called on tensors that require gradients, which gloo refuses |
| numpy.float | removed in numpy 1.24 |
| megatron.model.vision.knn_monitor | imports torchvision, for vision pre-training only |
| megatron.data.helpers, compile_helper | compiled into the user's cache instead of by make in the checkout |
| fused_kernels.load | looks for the CUDA compiler |
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.distributed
import wrapt

from mindio_tft_patch.adaptors.device import cpu_helpers, cpu_legacy_apex
from mindio_tft_patch.adaptors.device.cpu_registry import Registry
from mindio_tft_patch.adaptors.megatron_legacy.tree import find_tree

_HELPERS = "megatron.data.helpers"
_KNN = "megatron.model.vision.knn_monitor"


def install(registry: Registry) -> None:
    """Put the stand-ins in place; does nothing for other Megatrons."""
    if find_tree() is None:
        return
    for name, content in _missing_modules().items():
        _add(registry, name, content)
    _add_to_torch(registry)
    import numpy

    if not hasattr(numpy, "float"):
        registry.set(numpy, "float", float)
    if not any(isinstance(finder, _HelpersFinder) for finder in sys.meta_path):
        sys.meta_path.append(_HelpersFinder())
    for module, name in (("megatron.fused_kernels", "load"), ("megatron.data.dataset_utils", "compile_helper")):
        wrapt.register_post_import_hook(_skipping(registry, name), module)


def _missing_modules() -> dict[str, Mapping[str, Any]]:
    apex = cpu_legacy_apex
    own: dict[str, Mapping[str, Any]] = {
        "apex": {},
        "apex.optimizers": {"FusedAdam": apex.FusedAdam, "FusedSGD": apex.FusedSGD},
        "apex.multi_tensor_apply": {"multi_tensor_applier": apex.MultiTensorApply()},
        "amp_C": {
            "multi_tensor_l2norm": apex.multi_tensor_l2norm,
            "multi_tensor_scale": apex.multi_tensor_scale,
        },
        "fused_mix_prec_layer_norm_cuda": {
            "forward_affine": apex.forward_affine,
            "backward_affine": apex.backward_affine,
        },
    }
    modules = {name: content for name, content in own.items() if importlib.util.find_spec(_top(name)) is None}
    if not hasattr(torch, "_six"):
        modules["torch._six"] = {"inf": float("inf")}
    if importlib.util.find_spec("torchvision") is None:
        modules[_KNN] = {"compute_feature_bank": _needs_torchvision}
    return modules


def _top(name: str) -> str:
    return name.partition(".")[0]


def _add(registry: Registry, name: str, content: Mapping[str, Any]) -> None:
    """Put a module into sys.modules. It stays there when the stand-in is uninstalled: others have imported it."""
    if name in sys.modules:
        return
    module = ModuleType(name, "Stands in for a package that is not installed.")
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package="." not in name)
    vars(module).update(content)
    if name == "apex":
        module.__path__ = []
    sys.modules[name] = module
    parent, _, own = name.rpartition(".")
    if parent in ("torch", "apex"):
        registry.set(sys.modules[parent], own, module)


def _needs_torchvision(*_args: object) -> NoReturn:
    raise ModuleNotFoundError("Vision pre-training needs torchvision, which is not installed.")


def _add_to_torch(registry: Registry) -> None:
    registry.set_environment(os.environ, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    registry.set(torch.jit, "script", lambda obj, *_args, **_kwargs: obj)
    typed = torch.storage.TypedStorage
    if not hasattr(typed, "_untyped"):
        registry.set(typed, "_untyped", lambda storage: storage.untyped())
    for name in ("_all_gather_base", "_reduce_scatter_base"):
        for module in (torch.distributed, torch.distributed.distributed_c10d):
            if hasattr(module, name):
                registry.set(module, name, _without_gradient(getattr(module, name)))


def _without_gradient(collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def wrapper(output: torch.Tensor, part: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return collective(output.detach(), part.detach(), *args, **kwargs)

    return wrapper


def _skipping(registry: Registry, name: str) -> Callable[[ModuleType], None]:
    """Return the import hook that makes a function of the module do nothing."""

    def apply(module: ModuleType) -> None:
        if registry.active:
            registry.set(module, name, lambda *_args, **_kwargs: None)

    return apply


class _HelpersFinder(importlib.abc.MetaPathFinder):
    """Finds the dataset helpers when nothing else did."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for the compiled helpers, compiling them if need be."""
        for folder in path or () if fullname == _HELPERS else ():
            source = Path(folder) / "helpers.cpp"
            if source.is_file():
                library = cpu_helpers.compiled(source)
                loader = importlib.machinery.ExtensionFileLoader(fullname, str(library))
                return importlib.util.spec_from_file_location(fullname, library, loader=loader)
        return None
