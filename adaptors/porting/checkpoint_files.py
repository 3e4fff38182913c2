"""The files of a dying-gasp checkpoint: temporary folder, fsync, rename, tracker last. No torch, no communication.

Whatever happens at whatever moment, the save directory holds either the old state (older checkpoints, older tracker)
or the new one. The order that guarantees it:

1. everything is written into `.tft-dump-<step>-<attempt>-<random>`, a name that Megatron never looks at;
2. files and folders are fsynced and compared with what the ranks say they wrote;
3. a half-written folder of the same step is moved aside, the new one renamed into its place, the parent fsynced;
4. `latest_checkpointed_iteration.txt` is replaced by rename. Until here a restart loads the older checkpoint.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

log = logging.getLogger("mindio_tft_patch.dump")

TRACKER = "latest_checkpointed_iteration.txt"
TEMPORARY_PREFIX = ".tft-dump-"
ASIDE_PREFIX = ".tft-aside-"
LEFT_OVER_SECONDS = 3600.0

# What torch.distributed.checkpoint and Megatron write last: their presence means that everything before is there.
_LAST_FILES = (".metadata", "metadata.json")


class IncompleteError(Exception):
    """Files that should be there are missing or have another size."""


def folder_name(step: int) -> str:
    """Megatron's name for the checkpoint of a step."""
    return f"iter_{step:07d}"


def read_tracker(save: Path) -> int | None:
    """Step that a restart would load; None without a (readable) tracker or for a release checkpoint."""
    try:
        return int((save / TRACKER).read_text().strip())
    except (OSError, ValueError):
        return None


def existing_checkpoint(save: Path, step: int, *, not_before: float) -> Path | None:
    """The checkpoint of `step` that this job has already completed, if there is one.

    It is complete when the tracker names it, or, in torch_dist format, when the files that are written last are there
    (the job was hit between them and the tracker), and every file of it is this job's: a save that was cut off over an
    older checkpoint leaves files of both, and the older one's tracker and last files.

    Args:
        not_before: wall-clock seconds at which this job began (or, if known, its save of this step); an older file
            belongs to another run, whose step of this number need not be ours.
    """
    folder = save / folder_name(step)
    if not folder.is_dir():
        return None
    if read_tracker(save) != step and not all((folder / name).is_file() for name in _LAST_FILES):
        return None
    oldest = min((entry.stat().st_mtime for entry in folder.rglob("*") if entry.is_file()), default=None)
    return folder if oldest is not None and oldest >= not_before else None


def make_temporary(save: Path, step: int, attempt: int) -> Path:
    """A new empty folder below `save` that never counts as a checkpoint.

    Raises:
        OSError: `save` cannot be written.
    """
    save.mkdir(parents=True, exist_ok=True)
    temporary = save / f"{TEMPORARY_PREFIX}{step}-{attempt}-{secrets.token_hex(4)}"
    temporary.mkdir()
    return temporary


def sizes(folder: Path, files: Iterable[Path]) -> dict[str, int]:
    """Bytes of each file, keyed by its path below `folder`."""
    return {str(file.relative_to(folder)): file.stat().st_size for file in files}


def sync(path: Path) -> None:
    """Force a file or a folder's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems refuse fsync of a folder; they have no such cache to flush.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)


def sync_folders(folder: Path) -> None:
    """Force the entries of `folder` and of all folders below it to disk, innermost first."""
    for path, _, _ in os.walk(folder, topdown=False):
        sync(Path(path))


def check_complete(folder: Path, expected: Mapping[str, int]) -> None:
    """Compare what is on disk with what the ranks say they have written.

    Raises:
        IncompleteError: a file is missing, has another size, or nothing was written at all.
    """
    if not expected:
        raise IncompleteError(f"no rank has written anything into {folder}")
    for name, size in sorted(expected.items()):
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            raise IncompleteError(f"{folder / name} is not there ({error.strerror})") from error
        if found != size or found == 0:
            raise IncompleteError(f"{folder / name} has {found} bytes; its writer says {size}")


def publish(temporary: Path, save: Path, step: int) -> Path:
    """Make `temporary/iter_<step>` the checkpoint that a restart loads; returns its new path.

    Raises:
        OSError: a rename or fsync failed; the tracker still names the older checkpoint.
    """
    source, target = temporary / folder_name(step), save / folder_name(step)
    sync_folders(source)
    aside = _move_aside(target)
    try:
        os.rename(source, target)
    except OSError:
        if aside is not None:
            os.rename(aside, target)
        raise
    sync(save)
    write_tracker(save, step)
    return target


def write_tracker(save: Path, step: int) -> None:
    """Name `step` as the newest checkpoint: the old tracker or the new one, never half of one.

    Raises:
        OSError: it could not be written; the old tracker is intact.
    """
    fresh = save / f".{TRACKER}.{secrets.token_hex(4)}"
    try:
        with fresh.open("w") as stream:
            stream.write(str(step))
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(fresh, save / TRACKER)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    sync(save)


def room(save: Path) -> str:
    """In words, the space that is left below `save`; never raises."""
    try:
        usage = shutil.disk_usage(save)
    except OSError as error:
        return f"{save} cannot be looked at: {error.strerror}"
    mebibyte = 2**20
    return f"{usage.free / mebibyte:.1f} of {usage.total / mebibyte:.1f} MiB are free in {save}"


def discard(temporary: Path) -> None:
    """Remove a temporary folder as far as possible; never raises."""
    shutil.rmtree(temporary, ignore_errors=True)


def remove_left_overs(save: Path, *, now: float, keep: Path | None = None) -> list[Path]:
    """Remove temporary folders of earlier crashes that nobody has touched for an hour; never raises.

    Args:
        now: wall-clock seconds.
        keep: a folder that must stay, whatever its age.
    """
    removed = []
    for path in save.glob(f"{TEMPORARY_PREFIX}*"):
        try:
            age = now - path.stat().st_mtime
        except OSError:
            continue
        if path != keep and age > LEFT_OVER_SECONDS:
            discard(path)
            removed.append(path)
    return removed


def _move_aside(target: Path) -> Path | None:
    # Renamed, not deleted: it may be what is left of an earlier run, and deleting costs time that the job may not have.
    if not target.exists():
        return None
    aside = target.with_name(f"{ASIDE_PREFIX}{target.name}-{secrets.token_hex(4)}")
    os.rename(target, aside)
    # Read after the rename, of the tracker beside it: a save that was cut off is named by none.
    finished = read_tracker(target.parent) == int(target.name.rpartition("_")[2])
    what = "an older checkpoint of this step" if finished else "what is left of a save that was not finished"
    log.warning("%s was there already, %s; moved to %s", target, what, aside.name)
    return aside
