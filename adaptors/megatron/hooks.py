"""Wrappers around Megatron's training functions: guard, activities, records (points 1, 2, 5)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from mindio_tft_patch.adaptors.megatron.past import Past, start_of
from mindio_tft_patch.adaptors.megatron.resume import rerun_mode_survives
from mindio_tft_patch.adaptors.megatron.session import Session
from mindio_tft_patch.adaptors.megatron.train_state import TrainState, evaluation_samples
from mindio_tft_patch.adaptors.megatron.training_objects import Training
from mindio_tft_patch.processor.progress import ProgressBoard
from mindio_tft_patch.protocol.phases import Activity

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Hooks:
    """One method per wrapped function, in wrapt's signature.

    Args:
        after_first_iteration: called once, when the second iteration begins.
    """

    def __init__(self, session: Session, after_first_iteration: Callable[[], None]) -> None:
        self._session = session
        self._after_first_iteration = after_first_iteration
        self._iterations = 0

    @property
    def _board(self) -> ProgressBoard:
        return self._session.board

    def around_pretrain(self, wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """Set-up, training, and what comes after it: faults outside train() can be saved from, not recovered."""
        session = self._session
        try:
            result = wrapped(*args, **kwargs)
        except SystemExit as leaving:
            if leaving.code in (None, 0):
                session.finish()
            raise
        except BaseException as error:
            if session.guard is None:
                raise
            session.guard.last_resort(error)
        session.finish()
        return result

    def around_initialize_distributed(self, wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """Start controller and processor before torch.distributed."""
        from megatron.training.global_vars import get_args

        if self._session.guard is None:
            self._session.start(get_args())
        return wrapped(*args, **kwargs)

    def around_train(self, wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """train(forward_step_func, model, optimizer, opt_param_scheduler, ...) under the guard."""
        from megatron.training.global_vars import get_args

        session, megatron_args = self._session, get_args()
        assert session.guard is not None, "train() was entered before communication was initialised"
        given = inspect.signature(wrapped).bind(*args, **kwargs).arguments
        model, optimizer, scheduler = given["model"], given["optimizer"], given["opt_param_scheduler"]
        directory = _loaded_directory(megatron_args)
        session.log_state.resume(megatron_args.iteration, directory, megatron_args.log_interval)
        training = Training(
            args=megatron_args,
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            state=TrainState(megatron_args, model, optimizer, scheduler, megatron_args.iteration),
            checkpointing_context=given.get("checkpointing_context"),
            past=Past(None if session.returning else start_of(megatron_args)),
        )
        session.ready(training, given.get("train_data_iterator"), given.get("valid_data_iterator"))
        self._board.enter(Activity.BETWEEN)
        result = session.protection.run(lambda: wrapped(*args, **kwargs))
        session.left_train()
        return result

    def around_train_step(self, wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """One iteration."""
        in_place = self._session.in_place
        with nullcontext() if in_place is None else in_place.step():
            if in_place is not None and in_place.ending.repeated is not None:
                return wrapped(*args, **kwargs)  # the end of a completed step is repeated; nothing is computed
            self._session.boundary()
            return self._train_step(wrapped, args, kwargs)

    def _train_step(self, wrapped: Any, args: Args, kwargs: Kwargs) -> Any:
        training = self._session.training
        if training is not None:
            training.state.before_step()
        self._iterations += 1
        if self._iterations == 2:
            self._after_first_iteration()
        self._board.moment("step_begin")
        with self._board.doing(Activity.COMPUTE):
            result = wrapped(*args, **kwargs)
        self._board.moment("step_end")
        return result

    def around_evaluate(self, wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """evaluate(): long without a step, and its samples count as used even when it is interrupted."""
        from megatron.training.global_vars import get_args

        megatron_args, training = get_args(), self._session.training
        before = megatron_args.consumed_valid_samples
        try:
            with self._board.doing(Activity.EVALUATE), rerun_mode_survives():
                self._board.moment("evaluate")
                result = wrapped(*args, **kwargs)
        except BaseException:
            if training is not None:
                training.state.evaluation_counts(before + evaluation_samples(megatron_args))
            raise
        if training is not None:
            training.state.evaluation_counts(megatron_args.consumed_valid_samples)
        return result

    def around_save_checkpoint(self, wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """A periodic save: long without a step. Dying-gasp dumps come here too, and are none."""
        if self._board.activity is Activity.RECOVERY:
            return wrapped(*args, **kwargs)
        self._note_save(int(args[0] if args else kwargs["iteration"]))
        with self._board.doing(Activity.SAVE):
            self._board.moment("save")
            result = wrapped(*args, **kwargs)
            self._board.moment("save_end")
            return result

    def _note_save(self, step: int) -> None:
        from megatron.training.global_vars import get_args

        training, in_place, save = self._session.training, self._session.in_place, get_args().save
        if training is None:
            return
        if in_place is None or not save:
            training.past.begin_save(step)
        else:
            in_place.begin_save(training.past, step, Path(save))


def _loaded_directory(args: Any) -> Path | None:
    if not args.load or args.iteration <= 0:
        return None
    return Path(args.load) / f"iter_{args.iteration:07d}"
