"""The table of everything that is changed in the Megatron-LM of 2023, and why. `mindio-tft patches` prints it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from mindio_tft_patch.adaptors.megatron import arguments
from mindio_tft_patch.adaptors.megatron.hooks import Hooks
from mindio_tft_patch.adaptors.megatron.session import Session
from mindio_tft_patch.adaptors.megatron_legacy.checkpoints import LegacyCheckpoints
from mindio_tft_patch.adaptors.megatron_legacy.in_place import LegacyInPlace
from mindio_tft_patch.adaptors.megatron_legacy.update import Update, replica_groups
from mindio_tft_patch.adaptors.megatron_legacy.validate import around_validate
from mindio_tft_patch.config import Config
from mindio_tft_patch.patching import Patch

_TRAIN = ("forward_step_func", "model", "optimizer", "opt_param_scheduler")
_OPTIMIZERS = "megatron.optimizer.optimizer:"


def flag_patches(config: Config) -> list[Patch]:
    """Patches that add the flags to Megatron's parser."""
    return [dataclasses.replace(one, target="megatron.arguments:parse_args") for one in arguments.patches(config)]


def table(session: Session, after_first_iteration: Callable[[], None]) -> list[Patch]:
    """Every patch, in the order of the adaptation points."""
    hooks, update = Hooks(session, after_first_iteration), Update(session.gate, session.config)
    in_place, gate = session.in_place, session.gate
    checkpoints, training = LegacyCheckpoints(replica_groups), "megatron.training:"
    return [
        *flag_patches(session.config),
        Patch(
            4,
            "megatron.arguments:validate_args",
            around_validate(session.config),
            "refuses what cannot work",
            ("args", "defaults"),
        ),
        Patch(
            1,
            "megatron.initialize:_initialize_distributed",
            hooks.around_initialize_distributed,
            "start controller and processor before torch.distributed is initialised",
        ),
        Patch(
            4,
            training + "get_megatron_optimizer",
            update.around_build,
            "the optimizer with copies; its inner update at the commit gate",
            ("model", "no_weight_decay_cond", "scale_lr_cond", "lr_mult"),
        ),
        *(
            Patch(
                2,
                f"{_OPTIMIZERS}{name}.step",
                gate.around_step,
                "an iteration whose update is skipped passes the gate as well",
                ("args", "timers"),
                mandatory=False,
            )
            for name in ("MixedPrecisionOptimizer", "FP32Optimizer")
        ),
        Patch(
            2,
            "megatron.optimizer.distrib_optimizer:DistributedOptimizer.gather_model_params",
            update.around_gather,
            "nothing is gathered while the end of a step is repeated",
            ("args", "timers"),
            mandatory=False,
        ),
        Patch(5, training + "pretrain", hooks.around_pretrain, "faults before and after train()"),
        Patch(5, training + "train", hooks.around_train, "the guard around train()", _TRAIN),
        Patch(
            5,
            training + "train_step",
            hooks.around_train_step,
            "what a rank is doing; generator states before the step",
            ("forward_step_func", "data_iterator", "model", "optimizer", "opt_param_scheduler"),
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
            "megatron.checkpointing:save_checkpoint",
            hooks.around_save_checkpoint,
            "a long save is no hang",
            ("iteration", "model", "optimizer", "opt_param_scheduler"),
            mandatory=False,
        ),
        *checkpoint_patches(checkpoints),
        Patch(
            11,
            training + "training_log",
            session.log_state.around_training_log if in_place is None else in_place.around_training_log,
            "log averages go on where a dumped job, or an interrupted step, has stopped; no line is written twice",
            ("loss_dict", "total_loss_dict", "learning_rate", "iteration"),
        ),
        *(_in_place(in_place, session) if isinstance(in_place, LegacyInPlace) else []),
    ]


def checkpoint_patches(checkpoints: LegacyCheckpoints) -> list[Patch]:
    """Patches of names, saves and loads."""
    module = "megatron.checkpointing:"
    return [
        Patch(
            4,
            module + "get_checkpoint_names",
            checkpoints.around_names,
            "optimizer files are named by the shard within a copy",
            ("checkpoints_path", "iteration", "use_distributed_optimizer"),
            mandatory=False,
        ),
        Patch(
            4,
            module + "save_checkpoint",
            checkpoints.around_save,
            "only the first copy writes the optimizer",
            ("iteration", "model", "optimizer", "opt_param_scheduler"),
            mandatory=False,
        ),
        Patch(
            5,
            module + "load_checkpoint",
            checkpoints.around_load,
            "a checkpoint that cannot be loaded is an error, not a good end",
            ("model", "optimizer", "opt_param_scheduler", "load_arg"),
            mandatory=False,
        ),
    ]


def _in_place(in_place: LegacyInPlace, session: Session) -> list[Patch]:
    """What recovery in place needs beside the gate and the guard; not there without its flags."""
    training, gate = "megatron.training:", session.gate
    result = "a step's gradient norm and zeros, should its log line have to be written again"
    return [
        Patch(8, f"{_OPTIMIZERS}MegatronOptimizer.clip_grad_norm", gate.around_norm, result, mandatory=False),
        Patch(8, f"{_OPTIMIZERS}MegatronOptimizer.count_zeros", gate.around_zeros, result, mandatory=False),
        Patch(
            9,
            "megatron.checkpointing:load_checkpoint",
            in_place.around_load_checkpoint,
            "a process that comes back gets its state from a partner, not from a checkpoint",
            mandatory=False,
        ),
        *(
            Patch(
                9,
                f"megatron.data.{name}",
                in_place.around_index,
                "a process that comes back finds the index of a dataset without the others",
                mandatory=False,
                optional_target=True,
            )
            for name in ("gpt_dataset:_build_index_mappings", "dataset_utils:get_samples_mapping")
        ),
        Patch(
            11,
            training + "build_pretraining_data_loader",
            in_place.data.around_build_loader,
            "loaders whose position can be set",
            ("dataset", "consumed_samples"),
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
            training + "get_forward_backward_func",
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
            ("iteration", "model", "optimizer"),
            mandatory=False,
        ),
    ]
