"""Moments that the product's own hooks do not have, added by wrapping Megatron."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindio_tft_patch.patching import Patch, PatchManager
from mindio_tft_patch.processor.progress import ProgressBoard
from mindio_tft_patch.protocol.phases import Activity

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_WRITES = {Activity.SAVE: "save_write", Activity.RECOVERY: "dump_write"}


def add(board: ProgressBoard, gate: Any, version: str) -> PatchManager:
    """Let `board` have every moment of a schedule.

    Args:
        gate: the commit gate of this rank. version: of Megatron core.

    Returns:
        The manager of the wrappers; the gate stays wrapped when it reverts.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def before(target: str, moment: Callable[[], str | None], why: str) -> Patch:
        def wrapper(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            happening = moment()
            if happening is not None:
                board.moment(happening)
            return wrapped(*args, **kwargs)

        return Patch(0, target, wrapper, f"moment of an injected fault: {why}", mandatory=False)

    def of_forward() -> str:
        return "evaluate_forward" if board.activity is Activity.EVALUATE else "forward"

    manager = PatchManager()
    manager.apply(
        [
            before("megatron.training.training:setup_model_and_optimizer", lambda: "setup", "setup"),
            before("megatron.core.rerun_state_machine:RerunDataIterator.__next__", lambda: "loader", "loader"),
            before(f"{_SCHEDULES}:forward_step", of_forward, "forward and evaluate"),
            before(f"{_SCHEDULES}:backward_step", lambda: "backward", "backward"),
            before("torch.serialization:save", lambda: _WRITES.get(board.activity), "save and dump"),
        ],
        version,
    )
    register_optimizer_step_post_hook(lambda *_: board.moment("in_update"))
    board.listen(_echo_of_save(board))
    gate._barrier = _told(gate._barrier, board)
    return manager


def _echo_of_save(board: ProgressBoard) -> Callable[[str, int], None]:
    def echo(moment: str, step: int) -> None:
        if moment == "save_end":  # for ranks that have written nothing
            board.moment("save_write")

    return echo


def _told(barrier: Callable[[], None], board: ProgressBoard) -> Callable[[], None]:
    def gate() -> None:
        barrier()
        board.moment("barrier")

    return gate
