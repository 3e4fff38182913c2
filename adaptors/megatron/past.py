"""Which checkpoints are this job's own past: the one it has started from, and those that it has saved since.

A tracker alone does not tell: the save folder may hold checkpoints of an older run, or of a time line that the job has
left with --ckpt-step; and a job that took only the weights (--finetune) never was where that checkpoint is.

Whether a save was completed is read off the tracker, which Megatron writes last: before each save rank 0 notes what the
tracker looks like, and the save counts once the tracker names its step and looks different.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindio_tft_patch.adaptors.porting.checkpoint_files import TRACKER, folder_name, read_tracker
from mindio_tft_patch.errors import RecoveryError

_KEY = "past"
_PROCESS_BEGAN = time.time()  # wall clock, to compare with the times of files; imported before the first step
_COARSE_SECONDS = 1.0  # times of files may be cut to whole seconds


@dataclass(frozen=True)
class Checkpoint:
    """folder: as for --load. step: which of its checkpoints."""

    folder: str
    step: int


@dataclass
class Past:
    """What one rank knows of it; rank 0 keeps it in the job's store as well, for the one that takes its place.

    Attributes:
        start: what the job has started from, with its optimizer state; None: from nothing, or from weights only.
        saves: look of the tracker before the save of each step that was begun.
    """

    start: Checkpoint | None = None
    saves: dict[int, str] = field(default_factory=dict)
    _begun: dict[int, float] = field(default_factory=dict)
    _time_line: float = _PROCESS_BEGAN

    def begin_save(self, step: int, save: Path | None = None) -> None:
        """The save of a step is about to begin.

        Args:
            save: folder of the checkpoints; None on ranks that need not look.
        """
        self._begun[step] = time.time()
        if save is not None:
            self.saves[step] = _look(save)

    def went_back(self) -> None:
        """A checkpoint was loaded in place: files that were written until now are of a time line that was left."""
        self._time_line = time.time()
        self._begun.clear()

    def not_before(self, step: int) -> float:
        """Wall-clock seconds; a file of the checkpoint of `step` that is older is not of this job's last save of it."""
        return max(self._time_line, self._begun.get(step, 0.0) - _COARSE_SECONDS)

    def newest(self, args: Any) -> Checkpoint:
        """The checkpoint to go back to.

        Raises:
            RecoveryError: none is this job's own.
        """
        step = read_tracker(Path(args.save)) if args.save else None
        if step in self.saves and _look(Path(args.save)) != self.saves[step]:
            return Checkpoint(str(args.save), step)
        start = self.start
        if start is not None and _can_load(start, args):
            return start
        raise RecoveryError(
            "reload",
            f"there is no checkpoint to which all could go back: the job has saved none yet in {args.save}, and what "
            f"it started from ({args.load or 'nothing: no --load'}) is not a state that it was in, or no longer there",
        )

    def nothing_to_load(self, args: Any) -> str:
        """Why there is no checkpoint to go back to, in words; empty when there is one."""
        try:
            self.newest(args)
        except RecoveryError as refusal:
            return str(refusal).removeprefix("reload: ")
        return ""

    def publish(self, store: Any) -> None:
        """Leave it in the job's store."""
        start = None if self.start is None else [self.start.folder, self.start.step]
        store.set(_KEY, json.dumps({"start": start, "saves": list(self.saves.items())}))

    def adopt(self, store: Any) -> None:
        """Take over what the lost process has left in the job's store, if it had come so far."""
        if not store.check([_KEY]):
            return
        left = json.loads(store.get(_KEY))
        self.start = None if left["start"] is None else Checkpoint(*left["start"])
        self.saves = dict(left["saves"])


def start_of(args: Any) -> Checkpoint | None:
    """What Megatron has just loaded, if the job goes on exactly from there. args: after its set-up."""
    if not args.load or args.iteration <= 0 or args.finetune or args.no_load_optim:
        return None
    start = Checkpoint(str(args.load), int(args.iteration))
    # Megatron may have loaded a local (non-persistent) checkpoint, which lies elsewhere.
    return start if (Path(start.folder) / folder_name(start.step)).is_dir() else None


def _can_load(one: Checkpoint, args: Any) -> bool:
    folder = Path(one.folder)
    if not (folder / folder_name(one.step)).is_dir():
        return False
    tracked = read_tracker(folder)
    return tracked == one.step or (tracked is not None and hasattr(args, "ckpt_step"))


def _look(save: Path) -> str:
    """Content and time of the tracker."""
    tracker = save / TRACKER
    try:
        return f"{tracker.read_text().strip()}@{tracker.stat().st_mtime_ns}"
    except OSError:
        return ""
