"""Versions: Python, torch, Megatron, torch_npu, the launcher that would be found, and our own requirements."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from mindio_tft_patch.adaptors.doctor.command import PYTHON, TORCHRUN, TTPRUN
from mindio_tft_patch.adaptors.doctor.findings import Finding, error, ok, warning
from mindio_tft_patch.adaptors.doctor.reading import Reading
from mindio_tft_patch.config import Config

AREA = "versions"
IN_PLACE_FROM = (2, 14)  # torch with ProcessGroup.reconfigure
TORCH = SpecifierSet(">=2.6,<2.15")  # what launch.ttprun knows


def judge(reading: Reading, launcher: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Everything that is installed."""
    python = ".".join(map(str, sys.version_info[:3]))
    if reading.unsupported:
        message, change = reading.unsupported, "Use a megatron-core that is supported."
        for start in ("Install megatron-core", "Use megatron-core", "Remove one of them"):
            if start in message:
                message, rest = message.split(start, 1)
                change = start + rest
        yield error(AREA, message.strip(), change)
    elif reading.patches:
        yield error(
            AREA,
            f"{len(reading.patches)} functions of megatron-core {reading.megatron} do not fit: {reading.patches[0]}",
            "Run `mindio-tft patches`; use a supported Megatron, or remove what changes its functions.",
        )
    elif reading.megatron:
        found = f"megatron-core {reading.megatron} ({reading.megatron_path}), torch {reading.torch}, Python {python}"
        yield ok(AREA, f"{found}: every patch fits.")
    yield from _judge_torch(reading.torch, launcher)
    yield from _judge_npu(reading.torch)
    yield from _judge_checkout(reading.megatron_path, environ)
    yield from _judge_own()
    yield from _judge_launcher(launcher)


def judge_in_place(reading: Reading, config: Config) -> Iterator[Finding]:
    """Whether process groups can be rebuilt in place; the ranks ask the device itself, and refuse before training."""
    if not config.in_place or not reading.torch:
        return
    if Version(reading.torch).release < IN_PLACE_FROM:
        wanted = ".".join(map(str, IN_PLACE_FROM))
        yield error(
            AREA,
            f"Recovery in place connects process groups anew, which torch can from {wanted} on; {reading.torch} is "
            "installed.",
            f"Install torch {wanted}, or remove the flags of recovery in place.",
        )
    elif reading.accelerator and _version("torch-npu") is None:
        yield warning(
            AREA,
            "Recovery in place on NVIDIA GPUs needs torch's second NCCL backend, and NCCL 2.28 or newer; nobody has "
            "tried it.",
            "Set TORCH_DIST_USE_NCCL2=1 where the ranks run.",
        )
    elif reading.accelerator:
        yield warning(
            AREA,
            "Recovery in place on NPUs needs stop_device, restart_device, check_uce_in_memory and reinit_process_group "
            "of torch_npu: the ranks look for them at the start. Nobody has tried it.",
            "Run the doctor's command for a few steps, with `mindio-tft drill`.",
        )
    else:
        yield ok(AREA, f"torch {reading.torch} can connect gloo's process groups anew: recovery in place will start.")


def _judge_torch(version: str, launcher: str) -> Iterator[Finding]:
    if not version or launcher != TTPRUN:
        return
    if not TORCH.contains(Version(version).base_version):
        yield error(
            AREA,
            f"ttprun builds on the elastic agent of torch {TORCH}; torch {version} is installed.",
            "Use such a torch, or start with torchrun (the controller then lives in rank 0).",
        )


def _judge_npu(torch: str) -> Iterator[Finding]:
    npu = _version("torch-npu")
    if npu is None or not torch:
        return
    if Version(npu).release[:2] != Version(torch).release[:2]:
        yield error(AREA, f"torch_npu {npu} is not made for torch {torch}.", "Install the torch_npu of this torch.")
    else:
        yield ok(AREA, f"torch_npu {npu}.")


def _judge_checkout(path: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    checkout = environ.get("MEGATRON_LM_PATH")
    if checkout and path and not Path(path).resolve().is_relative_to(Path(checkout).resolve()):
        yield warning(
            AREA,
            f"MEGATRON_LM_PATH is {checkout}, but the job would import {path}: a job does not read that variable.",
            f"Set PYTHONPATH={checkout}, or unset MEGATRON_LM_PATH.",
        )


def _judge_own() -> Iterator[Finding]:
    try:
        wanted = [Requirement(text) for text in metadata.requires("mindio-tft-patch") or ()]
    except metadata.PackageNotFoundError:
        return  # used from a checkout
    for one in wanted:
        if one.marker is not None and not one.marker.evaluate({"extra": ""}):
            continue
        found = _version(one.name)
        if found is None or not one.specifier.contains(found, prereleases=True):
            yield error(AREA, f"{one} is needed; {found or 'nothing'} is installed.", f"Run pip install '{one}'.")


def _judge_launcher(launcher: str) -> Iterator[Finding]:
    if launcher == PYTHON:
        return
    found = shutil.which(launcher, path=f"{Path(sys.executable).parent}") or shutil.which(launcher)
    on_path = shutil.which(launcher)
    if found is None:
        yield warning(AREA, f"There is no {launcher} on PATH.", f"Activate the environment that has {launcher}.")
    elif on_path is not None and Path(on_path).resolve().parent != Path(sys.executable).parent.resolve():
        other = Path(on_path).parent
        if (Path(sys.executable).parent / TORCHRUN).exists():
            yield warning(
                AREA,
                f"The {launcher} on PATH is {on_path}, of another environment than this doctor's ({sys.executable}).",
                f"Run the mindio-tft of {other}, or activate one environment.",
            )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
