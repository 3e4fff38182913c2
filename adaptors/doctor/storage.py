"""The save directory: can a checkpoint be written there, will it fit, and will a restart find it?"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mindio_tft_patch.adaptors.doctor.findings import Finding, error, ok, warning
from mindio_tft_patch.adaptors.doctor.sizes import in_words
from mindio_tft_patch.adaptors.porting.checkpoint_files import ASIDE_PREFIX, TEMPORARY_PREFIX, TRACKER, folder_name

AREA = "save"
_PROBE_BYTES = 16 << 20
_LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "ramfs", "overlay", "f2fs"})


@dataclass(frozen=True)
class SaveFolder:
    """What is there now.

    Attributes:
        path: as given. exists: it is a folder.
        trouble: why nothing can be written; empty: it can.
        free_bytes: of the file system. bytes_per_second: of one writer with fsync; None: not measured.
        tracker: content of latest_checkpointed_iteration.txt; None without it.
        complete: steps of complete checkpoints. broken: steps of half-written ones.
        leftovers: names of folders that crashes have left.
        file_system: type, where the system tells it.
    """

    path: Path
    exists: bool = True
    trouble: str = ""
    free_bytes: int = 0
    bytes_per_second: float | None = None
    tracker: str | None = None
    complete: tuple[int, ...] = ()
    broken: tuple[int, ...] = ()
    leftovers: tuple[str, ...] = ()
    file_system: str = ""


@dataclass(frozen=True)
class Plan:
    """What the job means to do with it.

    checkpoint_bytes: estimate; None: not known. saves: periodic checkpoints of the whole training; None: not known.
    """

    load: str | None = None
    checkpoint_bytes: int | None = None
    saves: int | None = None
    dump_seconds: float = 120.0
    nodes: int = 1
    protected: bool = True


def nearest_existing(path: Path) -> Path:
    """The path itself, or the first of the folders around it that is there."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())


def look_at(path: Path) -> SaveFolder:
    """Look at a save directory. Writes a probe of 16 MiB into it and removes it; creates nothing else."""
    exists = path.is_dir()
    nearest = path if exists else nearest_existing(path.absolute().parent)
    trouble, speed = "", None
    if path.exists() and not exists:
        trouble = "it is not a folder"
    elif exists:
        trouble, speed = _probe(path)
    elif not os.access(nearest, os.W_OK | os.X_OK):
        trouble = f"it cannot be created: {nearest} is not writable"
    complete, broken = _checkpoints(path) if exists else ((), ())
    return SaveFolder(
        path=path,
        exists=exists,
        trouble=trouble,
        free_bytes=shutil.disk_usage(nearest).free,
        bytes_per_second=speed,
        tracker=_tracker(path),
        complete=complete,
        broken=broken,
        leftovers=_leftovers(path) if exists else (),
        file_system=_file_system(nearest),
    )


def judge(folder: SaveFolder, plan: Plan) -> Iterator[Finding]:
    """What is wrong with a save directory."""
    if folder.trouble:
        yield error(
            AREA,
            f"No checkpoint can be written into {folder.path}: {folder.trouble}.",
            "Make it writable, or give another --save.",
        )
    else:
        state = "is writable" if folder.exists else "does not exist yet and can be created"
        yield ok(AREA, f"{folder.path} {state}; {in_words(folder.free_bytes)} are free.")
    yield from _judge_space(folder, plan)
    yield from _judge_time(folder, plan)
    yield from _judge_tracker(folder)
    yield from _judge_load(folder, plan)
    if folder.leftovers:
        yield warning(
            AREA,
            f"{folder.path} holds what earlier crashes left behind: {', '.join(folder.leftovers[:4])}"
            f"{', ...' if len(folder.leftovers) > 4 else ''}. They never count as checkpoints but take space.",
            f"When no job writes there, remove {folder.path}/{folder.leftovers[0]} and its like.",
        )
    if plan.nodes > 1 and folder.file_system in _LOCAL:
        yield warning(
            AREA,
            f"{folder.path} is on {folder.file_system}, which looks local to this node, but the job has {plan.nodes} "
            "nodes: their files must end up in one folder.",
            "Give a --save on a file system that all nodes share.",
        )


def _judge_space(folder: SaveFolder, plan: Plan) -> Iterator[Finding]:
    size = plan.checkpoint_bytes
    if size is None:
        return
    if size > folder.free_bytes:
        yield error(
            AREA,
            f"A checkpoint takes about {in_words(size)}, but {in_words(folder.free_bytes)} are free in {folder.path}.",
            "Free space there, or give another --save.",
        )
    elif plan.saves is not None and size * (plan.saves + 1) > folder.free_bytes:
        yield warning(
            AREA,
            f"{plan.saves} periodic checkpoints of about {in_words(size)} each and one after a fault do not fit into "
            f"{in_words(folder.free_bytes)}; Megatron keeps them all.",
            "Free space while the job runs, or raise --save-interval.",
        )
    else:
        yield ok(AREA, f"A checkpoint takes about {in_words(size)} (estimate).")


def _judge_time(folder: SaveFolder, plan: Plan) -> Iterator[Finding]:
    if not plan.protected or plan.checkpoint_bytes is None or not folder.bytes_per_second:
        return
    seconds = plan.checkpoint_bytes / folder.bytes_per_second
    if seconds > plan.dump_seconds:
        yield warning(
            AREA,
            f"At the {in_words(folder.bytes_per_second)}/s that one writer reaches here, a checkpoint takes about "
            f"{seconds:.0f} s, but survivors get {plan.dump_seconds:g} s. Several writers may be faster.",
            f"Set TTP_OT to {2 * seconds:.0f} or more.",
        )


def _judge_tracker(folder: SaveFolder) -> Iterator[Finding]:
    newest = max(folder.complete, default=None)
    repair = (
        f"Write {newest}, the newest complete step, into {folder.path / TRACKER}, or move the iter_* folders away."
        if newest is not None
        else f"Move the iter_* folders out of {folder.path}, or give another --save; none is complete."
    )
    if folder.tracker is None:
        if folder.complete or folder.broken:
            yield error(
                AREA,
                f"{folder.path} has checkpoints but no {TRACKER}: Megatron would SILENTLY START FROM ITERATION 0 "
                "and overwrite them.",
                repair,
            )
        return
    if folder.tracker == "release":
        return
    step = int(folder.tracker) if folder.tracker.isdecimal() else None
    if step is None:
        yield error(AREA, f"{folder.path / TRACKER} holds {folder.tracker!r}, which is no step.", repair)
    elif step not in folder.complete:
        state = "is only half there" if step in folder.broken else "is not there"
        yield error(AREA, f"{TRACKER} names step {step}, but {folder.path / folder_name(step)} {state}.", repair)
    else:
        yield ok(AREA, f"{TRACKER} names step {step}, whose checkpoint is complete.")
        later = sorted(other for other in folder.broken if other > step)
        if later:
            yield warning(
                AREA,
                f"{folder.path / folder_name(later[-1])} is newer than the tracker and only half written.",
                "Nothing: it is not loaded, and is moved aside or written again when the job comes to that step.",
            )


def _judge_load(folder: SaveFolder, plan: Plan) -> Iterator[Finding]:
    if plan.load is None or Path(plan.load).absolute() != folder.path.absolute():
        yield warning(
            AREA,
            f"--load is {plan.load or 'not given'}, --save is {folder.path}: a restart would not find the checkpoint "
            "that was written after a fault.",
            f"Add --load {folder.path}; when nothing is there yet, training starts from scratch.",
        )


# ---------------------------------------------------------------------- looking


def _probe(path: Path) -> tuple[str, float | None]:
    """Why nothing can be written, and bytes a second."""
    probe = path / f".tft-doctor-{os.getpid()}"
    began = time.monotonic()
    try:
        with probe.open("wb") as stream:
            stream.write(os.urandom(1 << 16) * (_PROBE_BYTES >> 16))
            stream.flush()
            os.fsync(stream.fileno())
        return "", _PROBE_BYTES / max(1e-6, time.monotonic() - began)
    except OSError as problem:
        return str(problem.strerror or problem), None
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)


def _tracker(path: Path) -> str | None:
    try:
        return (path / TRACKER).read_text().strip()
    except OSError:
        return None


def _checkpoints(path: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    found = {int(one.name[5:]): one for one in path.glob("iter_*") if one.name[5:].isdecimal()}
    complete = sorted(step for step, folder in found.items() if is_complete(folder))
    return tuple(complete), tuple(sorted(set(found) - set(complete)))


def is_complete(folder: Path) -> bool:
    """Whether all files of a checkpoint seem to be there; nothing is read.

    torch_dist: `.metadata` is written last. torch: every model-parallel folder has its model file.
    """
    parts = [one for one in folder.glob("mp_rank_*") if one.is_dir()]
    if parts:
        return all(_filled(part / "model_optim_rng.pt") for part in parts)
    return all(_filled(folder / name) for name in (".metadata", "metadata.json")) and any(folder.glob("*.distcp"))


def _filled(file: Path) -> bool:
    return file.is_file() and file.stat().st_size > 0


def _leftovers(path: Path) -> tuple[str, ...]:
    return tuple(sorted(one.name for prefix in (TEMPORARY_PREFIX, ASIDE_PREFIX) for one in path.glob(f"{prefix}*")))


def _file_system(path: Path) -> str:
    """Type of the file system that holds a path, by the longest mount point; empty where /proc does not tell."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return ""
    resolved = path.resolve()
    fitting = [(len(point), kind) for point, kind in mounts if resolved.is_relative_to(point)]
    return max(fitting, default=(0, ""))[1]
