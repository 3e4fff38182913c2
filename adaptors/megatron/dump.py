"""Phase dump: the survivors write the checkpoint of the target step, with Megatron's own save_checkpoint.

    meet                  the participants build a world of their own (survivors.py)
    already there?        a periodic save of exactly this step may have completed just before the fault
    refresh parameters    the fault may have come before the parameter all-gather (shard_holders.py)
    save                  into a temporary folder, shards of dead ranks from their replicas (save_here.py, promote.py)
    publish               fsync, compare, rename, tracker last, by one rank (checkpoint_files.py)

Random states, scheduler, samples and loss scaler are saved as they are: the caller has set them to the target step.
A failure on any rank ends the dump on all of them within the deadline; older checkpoints and the tracker stay.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from mindio_tft_patch.adaptors.megatron.bucket_groups import drop_handles
from mindio_tft_patch.adaptors.megatron.save_here import checkpointing_module, saving_into
from mindio_tft_patch.adaptors.megatron.shard_holders import find_holders, refresh_parameters, speaking
from mindio_tft_patch.adaptors.porting import checkpoint_files as files
from mindio_tft_patch.adaptors.porting.survivors import SurvivorsWorld, no_check
from mindio_tft_patch.errors import DumpError
from mindio_tft_patch.processor.handlers import Outcome
from mindio_tft_patch.protocol.messages import Plan

log = logging.getLogger("mindio_tft_patch.dump")

FORMATS = ("torch", "torch_dist")
MODEL_FILE, OPTIMIZER_FILE = "model_optim_rng.pt", "distrib_optim.pt"

# Wall clock, to compare with the times of files. This module is imported before the first step.
PROCESS_BEGAN = time.time()


def write_dump(
    *,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    iteration: int,
    num_floating_point_operations_so_far: float,
    plan: Plan,
    attempt: int,
    args: Any,
    deadline_seconds: float,
    save: Callable[..., Any] | None = None,
    check: Callable[[], None] = no_check,
    extra_files: Mapping[str, bytes] | None = None,
    not_before: float = PROCESS_BEGAN,
) -> Outcome:
    """Write the checkpoint of `iteration`, together with the other participants of the plan.

    Args:
        model: list of DDP-wrapped model chunks, as Megatron's train() has it.
        attempt: number of the recovery; part of the names, so that two attempts cannot meet.
        args: Megatron's arguments; `args.save` is where the checkpoint goes. Unchanged afterwards.
        deadline_seconds: time for everything, from now.
        save: Megatron's save_checkpoint; None: whichever is bound now.
        check: called while waiting for other ranks; raises to give up.
        extra_files: small files to lay beside the checkpoint, by name; the first participant that has one decides.
        not_before: wall-clock seconds; a checkpoint of this step that has an older file is not this job's.

    Returns:
        detail: path of the checkpoint; bytes_moved: bytes that this rank has written.

    Raises:
        DumpError: nothing was published; older checkpoints and the tracker are as before.
    """
    _refuse(args)
    began = time.monotonic()
    world = SurvivorsWorld(plan.participants, attempt=attempt, deadline=began + deadline_seconds, check=check)
    job = _Dump(Path(args.save), iteration, args, world, not_before)
    with _without_collector(), world, _told_to_all(world, job):
        job.lap("meet")
        holders = find_holders(optimizer, plan, world)
        # Before the swap, after which "my rank" is that among the survivors.
        job_size = dist.get_world_size()
        world.swap()
        ready = world.from_leader(job.begin)
        if ready is not None:
            log.info("the checkpoint of step %d is complete already: %s", iteration, ready)
            return Outcome(detail=ready)
        job.temporary = Path(world.from_leader(lambda: str(files.make_temporary(job.save, iteration, attempt))))
        job.lap("prepare")
        for chunk in model:
            drop_handles(chunk)  # of parameter all-gathers that were under way (--overlap-param-gather)
        refresh_parameters(optimizer, holders)
        job.lap("refresh")
        job.choose_writers(any(one.speakers[0] == world.rank for one in holders))
        save_checkpoint = save or checkpointing_module().save_checkpoint
        with (
            speaking(holders, to_one_file=args.ckpt_format == "torch"),
            saving_into(job.temporary, args, world, writes_model=job.writes_model, job_size=job_size),
        ):
            save_checkpoint(iteration, model, optimizer, opt_param_scheduler, num_floating_point_operations_so_far)
        job.add_files(dict(extra_files or {}))
        job.lap("save")
        path, written = job.finish()
        job.lap("publish")
    took = ", ".join(f"{name} {seconds:.2f}" for name, seconds in job.laps.items())
    log.info("dying-gasp checkpoint of step %d: %s, %d bytes from here; seconds: %s", iteration, path, written, took)
    return Outcome(detail=path, bytes_moved=written)


@dataclass
class _Dump:
    """The files of one dump, seen from one rank.

    not_before: wall-clock seconds; a checkpoint of this step that has an older file is not this job's.
    temporary: folder that is written; None until it exists.
    writes_model, writes_optimizer: in `torch` format, which files of its model-parallel position this rank writes.
    """

    save: Path
    step: int
    args: Any
    world: SurvivorsWorld
    not_before: float = PROCESS_BEGAN
    temporary: Path | None = None
    writes_model: bool = False
    writes_optimizer: bool = False
    published: bool = field(default=False, init=False)
    added: list[Path] = field(default_factory=list, init=False)
    laps: dict[str, float] = field(default_factory=dict, init=False)
    _lap_began: float = field(default_factory=time.monotonic, init=False)

    def lap(self, name: str) -> None:
        """Note the seconds since the last lap."""
        now = time.monotonic()
        self.laps[name], self._lap_began = now - self._lap_began, now

    def begin(self) -> str | None:
        """On the leader: path of the checkpoint, if this job has completed it before the fault."""
        ready = files.existing_checkpoint(self.save, self.step, not_before=self.not_before)
        if ready is None:
            return None
        if files.read_tracker(self.save) != self.step:
            files.write_tracker(self.save, self.step)
        return str(ready)

    def choose_writers(self, speaks_first: bool) -> None:
        """Agree who writes which file of the `torch` format: the first survivor at each model-parallel position.

        Args:
            speaks_first: this rank is the first speaker of a sharded optimizer, where its whole state is gathered.
        """
        if self.args.ckpt_format != "torch":
            return
        place = str(self._own_folder())
        self.writes_optimizer = speaks_first and not self.args.no_save_optim
        everyone = self.world.gather((place, speaks_first))
        self.writes_model = [where for where, _ in everyone].index(place) == self.world.number
        writers = [where for where, speaks in everyone if speaks]
        twice = sorted({where for where in writers if writers.count(where) > 1})
        if twice:
            raise DumpError(
                f"two ranks speak for optimizers that share the file {Path(twice[0]) / OPTIMIZER_FILE}; the expert and"
                " the dense groups do not line up. Use --ckpt-format torch_dist."
            )

    def add_files(self, extra: dict[str, bytes]) -> None:
        """The leader lays the small files of all participants beside the checkpoint."""
        everyone = self.world.gather(extra)
        if not self.world.leads:
            return
        assert self.temporary is not None
        first = {name: content for one in reversed(everyone) for name, content in one.items()}
        for name, content in first.items():
            path = self.temporary / files.folder_name(self.step) / name
            path.write_bytes(content)
            self.added.append(path)

    def finish(self) -> tuple[str, int]:
        """Fsync, compare, publish. Returns the path and the bytes that this rank has written."""
        assert self.temporary is not None
        own = self._own_files()
        for file in own:
            files.sync(file)
        written = files.sizes(self.temporary, own)
        # Every participant is in this exchange only when its files are complete: if one dies, nothing is renamed.
        everyone = self.world.gather(written)
        expected = {name: size for one in everyone for name, size in one.items()}
        try:
            path = self.world.from_leader(lambda: self._publish(expected))
        except DumpError:
            raise
        except Exception:
            # The leader or the line to it broke; what counts is what is on disk.
            path = self._published_by_leader()
            if path is None:
                raise
        return str(path), sum(written.values())

    def clean_up(self) -> None:
        """Remove what was not published; never raises."""
        if self.temporary is not None and not self.published:
            files.discard(self.temporary)

    def _publish(self, expected: dict[str, int]) -> str:
        assert self.temporary is not None
        self.world.remaining_seconds()
        files.check_complete(self.temporary, expected)
        path = files.publish(self.temporary, self.save, self.step)
        self.published = True
        files.discard(self.temporary)
        for left_over in files.remove_left_overs(self.save, now=time.time()):
            log.info("removed %s, left over from an earlier crash", left_over)
        return str(path)

    def _published_by_leader(self) -> Path | None:
        folder = self.save / files.folder_name(self.step)
        # The leader renames before it writes the tracker, so the tracker proves both.
        self.published = self.published or (files.read_tracker(self.save) == self.step and folder.is_dir())
        return folder if self.published else None

    def _own_folder(self) -> Path:
        assert self.temporary is not None
        return Path(checkpointing_module().get_checkpoint_name(str(self.temporary), self.step)).parent

    def _own_files(self) -> list[Path]:
        assert self.temporary is not None
        if self.args.ckpt_format == "torch":
            place = self._own_folder()
            mine = [(MODEL_FILE, self.writes_model), (OPTIMIZER_FILE, self.writes_optimizer)]
            return [*(place / name for name, written in mine if written), *self.added]
        folder = self.temporary / files.folder_name(self.step)
        own = list(folder.glob(f"__{self.world.number}_*"))
        if self.world.leads:
            own += [file for file in folder.rglob("*") if file.is_file() and not file.name.startswith("__")]
        return own


@contextmanager
def _without_collector() -> Iterator[None]:
    """Python's cyclic garbage collection pauses, and for good when the dump fails.

    torch's writer, when the disk is full, leaves objects behind on which the collector crashes (torch 2.14). After a
    failed dump this process lives for seconds.
    """
    enabled = gc.isenabled()
    gc.disable()
    yield
    if enabled:
        gc.enable()


@contextmanager
def _told_to_all(world: SurvivorsWorld, job: _Dump) -> Iterator[None]:
    """Turn any failure into a DumpError that says why, on the other ranks too; remove what was begun.

    Interrupted passes unchanged: a newer command has come.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:  # the latter is torch's and no Exception
        # torch and Megatron pass on that a writer failed, not why. A full disk is told by what is left now.
        room = files.room(job.save)
        job.clean_up()
        reason, first_hand = _reason(error, world)
        # What broken connections say on this rank is not worth telling when another one knows the cause.
        told = {} if first_hand else world.reports(patience_seconds=1.0)
        if told:
            reason = "; ".join(f"rank {rank}: {why}" for rank, why in sorted(told.items()))
        elif first_hand:
            # The others wake up when this rank leaves the world, so the word is there before they look for it.
            world.report(reason)
        raise DumpError(
            f"the checkpoint of step {job.step} was not written ({room}): {reason}. Older checkpoints are untouched.",
            collateral=bool(told) or _failed_elsewhere(error, world),
        ) from error
    except BaseException:
        job.clean_up()
        raise


def _failed_elsewhere(error: BaseException, world: SurvivorsWorld) -> bool:
    return isinstance(error, CheckpointException) and bool(error.failures) and world.number not in error.failures


def _reason(error: BaseException, world: SurvivorsWorld) -> tuple[str, bool]:
    """What went wrong, and whether that is the cause and not only its consequence on this rank."""
    if isinstance(error, CheckpointException):
        causes = [f"rank {world.ranks[number]}: {cause}" for number, (cause, _) in sorted(error.failures.items())]
        return "; ".join(causes) or "another rank could not write", bool(causes)
    reason = str(error).removeprefix("dump: ") or type(error).__name__
    if isinstance(error, (DumpError, OSError)):
        return reason, True
    return f"the survivors could not finish it together ({reason})", False


def _refuse(args: Any) -> None:
    if not args.save:
        raise DumpError("there is no place to save to. Add --save.")
    if args.ckpt_format not in FORMATS:
        raise DumpError(f"--ckpt-format {args.ckpt_format} is not served; use one of {', '.join(FORMATS)}.")
