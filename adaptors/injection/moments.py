"""Moments that the product's own hooks do not have, added by wrapping Megatron, or by torch's hooks elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from mindio_tft_patch.patching import Patch, PatchManager
from mindio_tft_patch.processor.progress import ProgressBoard
from mindio_tft_patch.protocol.phases import Activity

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_WRITES = {Activity.SAVE: "save_write", Activity.RECOVERY: "dump_write"}


def add(board: ProgressBoard, gate: Any, version: str) -> PatchManager:
    """Let `board` have every moment of a schedule, in a job of Megatron.

    Args:
        gate: the commit gate of this rank. version: of Megatron core.

    Returns:
        The manager of the wrappers; the gate stays wrapped when it reverts.
    """

    def of_forward() -> str:
        return "evaluate_forward" if board.activity is Activity.EVALUATE else "forward"

    manager = PatchManager()
    manager.apply(
        [
            _before(board, "megatron.training.training:setup_model_and_optimizer", lambda: "setup", "setup"),
            _before(board, "megatron.core.rerun_state_machine:RerunDataIterator.__next__", lambda: "loader", "loader"),
            _before(board, f"{_SCHEDULES}:forward_step", of_forward, "forward and evaluate"),
            _before(board, f"{_SCHEDULES}:backward_step", lambda: "backward", "backward"),
            _of_writes(board),
        ],
        version,
    )
    _add_others(board, gate)
    return manager


def add_to_framework(board: ProgressBoard, gate: Any, model: Iterable[Any]) -> None:
    """The same in a job of any other framework, as far as torch lets its moments be seen.

    Args:
        gate: the commit gate of this rank (porting.gate.StepGate).
        model: torch modules, of which one forward pass each is a micro-batch.
    """

    def of_forward(*_: Any) -> None:
        board.moment("evaluate_forward" if board.activity is Activity.EVALUATE else "forward")

    for chunk in model:
        chunk.register_forward_pre_hook(of_forward)
        chunk.register_full_backward_pre_hook(lambda *_: board.moment("backward"))
    PatchManager().apply([_of_writes(board)], "")
    _add_others(board, gate)


def _before(board: ProgressBoard, target: str, moment: Callable[[], str | None], why: str) -> Patch:
    def wrapper(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        happening = moment()
        if happening is not None:
            board.moment(happening)
        return wrapped(*args, **kwargs)

    return Patch(0, target, wrapper, f"moment of an injected fault: {why}", mandatory=False)


def _of_writes(board: ProgressBoard) -> Patch:
    return _before(board, "torch.serialization:save", lambda: _WRITES.get(board.activity), "save and dump")


def _add_others(board: ProgressBoard, gate: Any) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(lambda *_: board.moment("in_update"))
    board.listen(_echo_of_save(board))
    gate._barrier = _told(gate._barrier, board)


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
