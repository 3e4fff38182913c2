"""The table of everything that is changed in Megatron, and why. `mindio-tft patches` prints it.

Signatures that differ between versions are told apart here, by `versions`; wrappers take (wrapped, instance, args,
kwargs) and do not care.
"""

from __future__ import annotations

from collections.abc import Callable

from mindio_tft_patch.adaptors.megatron import arguments, replica, validate
from mindio_tft_patch.adaptors.megatron.gate import CommitGate
from mindio_tft_patch.adaptors.megatron.hooks import Hooks
from mindio_tft_patch.adaptors.megatron.in_place import InPlace
from mindio_tft_patch.adaptors.megatron.session import Session
from mindio_tft_patch.patching import Patch

_OPTIMIZERS = "megatron.core.optimizer.optimizer"
_TRAIN = ("forward_step_func", "model", "optimizer", "opt_param_scheduler")


def table(session: Session, after_first_iteration: Callable[[], None]) -> list[Patch]:
    """Every patch, in the order of the adaptation points."""
    hooks, gate = Hooks(session, after_first_iteration), session.gate
    training = "megatron.training.training:"
    ddp = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel."
    update_classes = ("MixedPrecisionOptimizer", "FP32Optimizer", "ChainedOptimizer")
    in_place = session.in_place
    return [
        *([] if in_place is None else _in_place(in_place, gate)),
        *arguments.patches(session.config),
        *validate.patches(session.config),
        Patch(
            1,
            "megatron.training.initialize:_initialize_distributed",
            hooks.around_initialize_distributed,
            "start controller and processor before torch.distributed is initialised",
        ),
        *(
            Patch(
                2,
                f"{_OPTIMIZERS}:{name}.step_with_ready_grads",
                gate.around_update,
                "commit gate: mark the local update, put parameter all-gathers behind the mark",
                mandatory=False,
            )
            for name in update_classes
        ),
        Patch(
            2,
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.step_with_ready_grads",
            gate.around_update,
            "commit gate of the distributed optimizer",
            mandatory=False,
        ),
        *(
            Patch(
                2,
                f"{_OPTIMIZERS}:{name}.step",
                gate.around_step,
                "an iteration whose update is skipped passes the gate as well",
                mandatory=False,
            )
            for name in update_classes
        ),
        Patch(
            2,
            ddp + "start_param_sync",
            gate.around_param_sync,
            "the parameter all-gather waits until the local update is marked as complete",
            mandatory=False,
        ),
        Patch(
            2,
            ddp + "_start_bucket_group_param_sync",
            gate.around_param_sync,
            "the same, bucket by bucket",
            versions=">=0.17",
            mandatory=False,
            optional_target=True,
        ),
        *replica.patches(session.config),
        Patch(5, training + "pretrain", hooks.around_pretrain, "faults before and after train()"),
        Patch(5, training + "train", hooks.around_train, "the guard around train()", parameters=_TRAIN),
        Patch(
            5,
            training + "train_step",
            hooks.around_train_step,
            "what a rank is doing; generator states before the step",
            parameters=("forward_step_func", "data_iterator", "model", "optimizer", "opt_param_scheduler", "config"),
        ),
        Patch(
            5,
            training + "evaluate",
            hooks.around_evaluate,
            "a long evaluation is no hang; its samples",
            mandatory=False,
        ),
        Patch(
            5,
            "megatron.training.checkpointing:save_checkpoint",
            hooks.around_save_checkpoint,
            "a long save is no hang",
            parameters=("iteration", "model", "optimizer", "opt_param_scheduler"),
            mandatory=False,
        ),
        Patch(
            11,
            training + "training_log",
            session.log_state.around_training_log if in_place is None else in_place.around_training_log,
            "log averages go on where a dumped job, or an interrupted step, has stopped; no line is written twice",
            parameters=("loss_dict", "total_loss_dict"),
        ),
    ]


def _in_place(in_place: InPlace, gate: CommitGate) -> list[Patch]:
    """What recovery in place needs beside the gate and the guard; not there without its flags."""
    training, chain = "megatron.training.training:", ("MegatronOptimizer", "ChainedOptimizer")
    result = "a step's gradient norm and zeros, should its log line have to be written again"
    norms = [f"{name}.{method}" for name in chain for method in ("get_grad_norm", "clip_grad_norm")]
    return [
        *(
            Patch(8, f"{_OPTIMIZERS}:{name}", gate.around_norm, result, mandatory=False, optional_target=True)
            for name in norms
        ),
        *(Patch(8, f"{_OPTIMIZERS}:{name}.count_zeros", gate.around_zeros, result, mandatory=False) for name in chain),
        Patch(
            9,
            "megatron.training.checkpointing:load_checkpoint",
            in_place.around_load_checkpoint,
            "a process that comes back gets its state from a partner, not from a checkpoint",
            mandatory=False,
        ),
        Patch(
            11,
            training + "build_pretraining_data_loader",
            in_place.data.around_build_loader,
            "loaders whose position can be set",
            mandatory=False,
        ),
        Patch(
            11,
            training + "build_train_valid_test_data_iterators",
            in_place.around_build_iterators,
            "data iterators that can be rewound; flags that rank 0 broadcasts",
            mandatory=False,
        ),
        Patch(
            11,
            "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
            in_place.ending.around_get_forward_backward,
            "notes the losses of a step, to write its log line again without computing it",
        ),
        Patch(
            11,
            training + "evaluate_and_print_results",
            in_place.around_evaluation,
            "no completed evaluation is repeated",
            mandatory=False,
        ),
        Patch(
            11,
            training + "save_checkpoint_and_time",
            in_place.around_save,
            "no completed save is repeated",
            parameters=("iteration", "model", "optimizer"),
            mandatory=False,
        ),
    ]
