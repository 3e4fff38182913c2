"""Megatron on CPU: a stand-in for `torch.cuda`, so that unmodified Megatron trains over gloo.

Megatron asks `torch.cuda` for devices, streams, generators and memory statistics, and creates its tensors on
'cuda'. The stand-in answers every such question with "one device, which is the CPU". It is for tests, for
demonstrations and for trying out a fault without hardware; it never replaces a real accelerator.

This file decides and installs; `cpu_torch.py` is the table of what stands in for what in torch,
`cpu_distributed.py` the little that gloo needs, and `cpu_megatron.py` the table of corrections that Megatron itself
needs once it is imported. `cpu_legacy.py` has what the Megatron-LM of 2023 needs in addition.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from mindio_tft_patch.adaptors.device.cpu_registry import Registry

logger = logging.getLogger("mindio_tft_patch")

# One stand-in per process: torch.cuda is a module, so there is nothing to have two of.
_registry = Registry()


def accelerator_present() -> bool:
    """Return whether torch reaches a real CUDA or NPU device in this process, stand-in or not."""
    if _registry.active:
        # It was asked before the stand-in went in; now torch.cuda would only describe the stand-in.
        return False
    if importlib.util.find_spec("torch_npu") is not None and _npu_present():
        return True
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


def wanted(
    argv: Sequence[str], environ: Mapping[str, str], *, accelerator: Callable[[], bool] = accelerator_present
) -> bool:
    """Return whether this job asked for the CPU stand-in and may have it.

    `TFT_DEVICE=cpu` asks for it; so does `--distributed-backend gloo` while TFT_DEVICE is unset or `auto`,
    because Megatron on accelerators uses another backend. A job that finds an accelerator never gets it.

    argv: the arguments of the training script. environ: the environment of the process.
    accelerator: tells whether there is one; asked last, because it imports torch, for which a job that does not
        want the stand-in must not pay.
    """
    device = environ.get("TFT_DEVICE", "").strip().lower() or "auto"
    asked = device == "cpu" or (device == "auto" and _backend(argv) == "gloo")
    return asked and not accelerator()


def install_cpu_stand_in() -> None:
    """Make the CPU stand in for CUDA in this process; a second call does nothing.

    Call it before Megatron is imported where possible; names that Megatron already imported by value are
    rebound. Raises RuntimeError where a real accelerator is present.
    """
    if _registry.active:
        return
    if accelerator_present():
        raise RuntimeError(
            "The CPU stand-in was asked for, but this process has a real accelerator. Unset TFT_DEVICE (or set it to "
            "'auto') to train on the accelerator, or hide the accelerator (CUDA_VISIBLE_DEVICES='') to train on CPU."
        )
    # Before the first replacement: import hooks that fire while we install look at it.
    _registry.active = True
    try:
        _install(_registry)
    except BaseException:
        _registry.revert()
        raise
    logger.warning("CPU stand-in active: torch.cuda is answered by the CPU. For tests and demonstrations only.")


def _install(registry: Registry) -> None:
    """Set the environment and install both tables."""
    # Dynamo would try to compile for CUDA; it reads this once, at its first import.
    registry.set_environment(os.environ, "TORCHDYNAMO_DISABLE", "1")
    # Megatron insists on it for every GPU older than Blackwell; on CPU it has no meaning.
    if "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ:
        registry.set_environment(os.environ, "CUDA_DEVICE_MAX_CONNECTIONS", "1")

    from mindio_tft_patch.adaptors.device import cpu_distributed, cpu_legacy, cpu_megatron, cpu_torch

    cpu_torch.install(registry)
    cpu_distributed.install(registry)
    cpu_megatron.install(registry)
    cpu_legacy.install(registry)
    registry.rebind_importers(sys.modules, prefix="megatron")


def uninstall_cpu_stand_in() -> None:
    """Put everything back that `install_cpu_stand_in` replaced; without the stand-in it does nothing.

    Objects made meanwhile (streams, events) stay stand-ins, and import hooks stay registered but do nothing.
    """
    _registry.revert()


def _backend(argv: Sequence[str]) -> str | None:
    """Return the value of --distributed-backend, the last one given as argparse would have it."""
    value = None
    for position, argument in enumerate(argv):
        name, equals, rest = argument.partition("=")
        if name != "--distributed-backend":
            continue
        if equals:
            value = rest
        elif position + 1 < len(argv):
            value = argv[position + 1]
    return value


def _npu_present() -> bool:
    """Return whether torch_npu loads and sees a device."""
    try:
        import torch
        import torch_npu  # noqa: F401  (registers torch.npu)
    except Exception as problem:
        # A broken vendor installation must not look like an accelerator; its message is the useful part.
        logger.warning("torch_npu is installed but cannot be loaded (%s); no NPU is assumed.", problem)
        return False
    npu = getattr(torch, "npu", None)
    return npu is not None and bool(npu.is_available())
