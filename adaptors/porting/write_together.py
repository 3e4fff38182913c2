"""Phase dump, what of it is the same for every framework: the survivors write one checkpoint (adaptation point 7).

    meet       the participants build a world of their own (survivors.py); no group of the job is used
    write      each its files, into a temporary folder
    publish    compare, fsync, rename, tracker last, by one rank (checkpoint_files.py)

A failure on any rank ends the dump on all of them within the deadline; older checkpoints and the tracker stay.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from mindio_tft_patch.adaptors.porting import checkpoint_files as files
from mindio_tft_patch.adaptors.porting.protection import Protection
from mindio_tft_patch.adaptors.porting.survivors import SurvivorsWorld
from mindio_tft_patch.errors import DumpError
from mindio_tft_patch.processor.handlers import Outcome
from mindio_tft_patch.protocol.messages import Plan

log = logging.getLogger("mindio_tft_patch.dump")

_PROCESS_BEGAN = time.time()  # wall clock, to compare with the times of files


def write_together(
    plan: Plan,
    protection: Protection,
    save: str | os.PathLike[str],
    write: Callable[[Path], Iterable[str | os.PathLike[str]]],
) -> Outcome:
    """Write the checkpoint `save`/iter_<target step>, together with the other participants.

    Args:
        save: folder of the checkpoints; a str is as good as a Path, here and in what `write` returns.
        write: writes this rank's files below the folder that it is given, without communication; returns their paths,
            none where another rank speaks for all that this one holds.

    Returns:
        detail: path of the checkpoint; bytes_moved: bytes that this rank has written.

    Raises:
        DumpError: nothing was published.
    """
    save = Path(save)
    deadline = time.monotonic() + protection.config.dump_timeout_seconds
    check, step, attempt = protection.device.flag.check, plan.target_step, protection.attempt
    with SurvivorsWorld(plan.participants, attempt=attempt, deadline=deadline, check=check) as world:
        world.swap()
        ready = world.from_leader(lambda: _already_there(save, step))
        if ready is not None:
            return Outcome(detail=ready)
        temporary = Path(world.from_leader(lambda: str(files.make_temporary(save, step, attempt))))
        try:
            sizes, error = _write(temporary, step, write)
            everyone = world.gather((sizes, "" if error is None else f"rank {world.rank}: {error}"))
            told = "; ".join(reason for _, reason in everyone if reason)
            if told:
                reason = f"the checkpoint of step {step} was not written: {told}. Older checkpoints are untouched."
                raise DumpError(reason, collateral=error is None) from error
            expected = {name: size for one, _ in everyone for name, size in one.items()}
            path = world.from_leader(lambda: _publish(temporary, save, step, expected))
        except RuntimeError as problem:  # of a collective: another participant has left
            reason = f"the survivors could not finish the checkpoint of step {step} together ({problem})"
            raise DumpError(reason, collateral=True) from problem
        finally:
            if world.leads:
                files.discard(temporary)
    log.info("dying-gasp checkpoint of step %d: %s, %d bytes from here", step, path, sum(sizes.values()))
    return Outcome(detail=path, bytes_moved=sum(sizes.values()))


def _write(
    temporary: Path, step: int, write: Callable[[Path], Iterable[str | os.PathLike[str]]]
) -> tuple[dict[str, int], Exception | None]:
    """Sizes of the files written here, and what went wrong."""
    folder = temporary / files.folder_name(step)
    try:
        folder.mkdir(exist_ok=True)
        written = [Path(file) for file in write(folder)]
        for path in written:
            files.sync(path)
        return files.sizes(temporary, written), None
    except Exception as error:
        return {}, error


def _already_there(save: Path, step: int) -> str | None:
    """Path of the checkpoint, if this job has completed it before the fault."""
    found = files.existing_checkpoint(save, step, not_before=_PROCESS_BEGAN)
    if found is not None and files.read_tracker(save) != step:
        files.write_tracker(save, step)
    return None if found is None else str(found)


def _publish(temporary: Path, save: Path, step: int, expected: dict[str, int]) -> str:
    files.check_complete(temporary, expected)
    return str(files.publish(temporary, save, step))
