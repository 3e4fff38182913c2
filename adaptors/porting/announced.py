"""Moments of a fault on purpose that are seen in the parts which a framework uses anyway; only in jobs with TFT_INJECT.

The names are those of Megatron's hooks (fault_injection.MOMENTS). They are announced here and not by the parts
themselves, because Megatron's adaptor uses the same parts and has these moments of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from mindio_tft_patch.patching import Patch, PatchManager
from mindio_tft_patch.processor.progress import ProgressBoard
from mindio_tft_patch.protocol.phases import Activity

# What hands out micro-batches; one of them may be inside of the other.
_ITERATORS = (
    "mindio_tft_patch.adaptors.porting.rewindable:Rewindable.__next__",
    "torch.utils.data.dataloader:_BaseDataLoaderIter.__next__",
)
_OF_A_STEP = (Activity.COMPUTE, Activity.BETWEEN)  # not the data of an evaluation


def announce(board: ProgressBoard) -> PatchManager:
    """Let `board` have the moments "between", "gather" and, where the data comes from such an iterator, "loader".

    Returns:
        The manager of the wrappers around the iterators.
    """
    board.listen(_echo(board))
    manager, loader = PatchManager(), _Loader(board)
    why = "moment of an injected fault: loader"
    manager.apply([Patch(0, target, loader, why, mandatory=False) for target in _ITERATORS], "")
    return manager


def _echo(board: ProgressBoard) -> Callable[[str, int], None]:
    def echo(moment: str, step: int) -> None:
        if moment == "boundary":
            board.moment("step_begin")
        # An update that is finished in the clean phase is followed by no all-gather of the trainer.
        elif moment == "committed" and board.activity is not Activity.RECOVERY:
            board.moment("gather")

    return echo


class _Loader:
    """Wrapper of `__next__`; announces the outermost call."""

    def __init__(self, board: ProgressBoard) -> None:
        self._board = board
        self._inside = False

    def __call__(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A thread that reads ahead is no place for a fault of the step.
        ahead = threading.current_thread() is not threading.main_thread()
        if ahead or self._inside or self._board.activity not in _OF_A_STEP:
            return wrapped(*args, **kwargs)
        self._inside = True
        try:
            self._board.moment("loader")
            return wrapped(*args, **kwargs)
        finally:
            self._inside = False
