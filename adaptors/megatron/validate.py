"""Refuses before training what cannot work, each with the flag to change.

`check` is a pure function of `Facts`, so that `mindio-tft doctor` says the same before the job as the hook says in it.
The hook sits behind Megatron's own validation; it also switches Megatron's replica layout on, because nothing has read
the arguments yet.
"""

from __future__ import annotations

import logging
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mindio_tft_patch.adaptors.megatron import versions
from mindio_tft_patch.adaptors.megatron.arguments import set_switches
from mindio_tft_patch.adaptors.refusal import tell_launcher
from mindio_tft_patch.config import (
    ELASTIC_FLAG,
    HBM_FLAG,
    MASTER_FLAG,
    NO_REPLICA_FLAG,
    REBOOT_FLAG,
    Config,
    check_flags,
)
from mindio_tft_patch.errors import ConfigError
from mindio_tft_patch.patching import Patch

logger = logging.getLogger("mindio_tft_patch.validate")


class Severity(str, Enum):
    """Whether training may start."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True)
class Finding:
    """message: what is wrong and why. change: what to change, naming the flag."""

    severity: Severity
    message: str
    change: str


@dataclass(frozen=True)
class Facts:
    """What the refusals depend on.

    Attributes:
        flags: feature flags that are on, from the command line or from HIGH_AVAILABILITY.
        copies: N, as the user asked for it (TFT_REPLICAS, or 1 with --distributed-optimizer-no-replica).
        dense_size: data-parallel size of dense parameters, context parallelism included.
        expert_size: data-parallel size of expert parameters; None without experts.
        distributed_optimizer: the optimizer state is sharded.
        user_instances: --num-distributed-optimizer-instances as given by the user.
        save: checkpoint folder. save_interval: steps between periodic checkpoints.
        lacks_einops: the package einops, which Megatron from 0.17 on needs to build the replica groups, is missing.
        options: Megatron's other arguments that `check` looks at, by attribute name; absent: not set.
    """

    flags: frozenset[str] = frozenset({MASTER_FLAG})
    copies: int = 2
    dense_size: int = 2
    expert_size: int | None = None
    distributed_optimizer: bool = True
    user_instances: int = 1
    save: str | None = "checkpoints"
    save_interval: int | None = 1000
    lacks_einops: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def effective_copies(self) -> int:
        """N; the user's own --num-distributed-optimizer-instances counts as N."""
        return self.user_instances if self.user_instances > 1 else self.copies


# attribute of Megatron's arguments: (flag, why it cannot work)
REFUSED: dict[str, tuple[str, str]] = {
    "optimizer_cpu_offload": (
        "--optimizer-cpu-offload",
        "optimizer state in host memory is updated in pieces, so a fault in the update leaves no complete copy",
    ),
    "swap_optimizer": ("--swap-optimizer", "swapped-out optimizer state cannot be read when a rank is lost"),
    "rl_offload_optimizer_during_inference": (
        "--rl-offload-optimizer-during-inference",
        "offloaded optimizer state cannot be read when a rank is lost",
    ),
    "use_megatron_fsdp": ("--use-megatron-fsdp", "fully sharded parameters have no second holder"),
    "use_custom_fsdp": ("--use-custom-fsdp", "fully sharded parameters have no second holder"),
    "use_torch_fsdp2": ("--use-torch-fsdp2", "fully sharded parameters have no second holder"),
    "overlap_param_gather_with_optimizer_step": (
        "--overlap-param-gather-with-optimizer-step",
        "it mixes communication into the local update, which a fault could then leave half done",
    ),
    "reuse_grad_buf_for_mxfp8_param_ag": (
        "--reuse-grad-buf-for-mxfp8-param-ag",
        "parameters are gathered into the gradient buffer, so that an update cannot be finished after a fault",
    ),
    "use_layer_wise_distributed_optimizer": (
        "the layer-wise distributed optimizer (--optimizer dist_muon)",
        "it keeps each layer's state on one rank only",
    ),
    "optimizer_cuda_graph": (
        "--optimizer-cuda-graph",
        "the update runs inside a CUDA graph, where it cannot be told how far it has come",
    ),
    "inprocess_restart": ("--inprocess-restart", "two tools would restart the same training loop"),
    "enable_ft_package": ("--enable-ft-package", "two tools would watch and end the same processes"),
    "perform_rl_step": ("--perform-rl-step", "the reinforcement-learning loop is not train()"),
}

FORMATS = ("torch", "torch_dist")
OPTIONS = (
    *REFUSED,
    "optimizer",
    "ckpt_format",
    "gtp_weight_remat_size",
    "async_save",
    "log_params_norm",
    "data_parallel_random_init",
    "dataloader_type",
)


def lacks_einops() -> bool:
    """Return whether the installed Megatron would miss einops."""
    return versions.find_megatron().matches(versions.NEW) and find_spec("einops") is None


def facts_of(arguments: Namespace, config: Config, *, lacks_einops: bool = False) -> Facts:
    """Collect the facts from Megatron's validated arguments."""
    switches = {
        MASTER_FLAG: config.high_availability,
        HBM_FLAG: config.hbmfault_repair,
        REBOOT_FLAG: config.worker_reboot,
        NO_REPLICA_FLAG: config.no_replica,
        ELASTIC_FLAG: config.elastic_training,
    }
    return Facts(
        flags=frozenset(flag for flag, on in switches.items() if on),
        copies=config.copies,
        dense_size=arguments.data_parallel_size * arguments.context_parallel_size,
        expert_size=_expert_size(arguments),
        distributed_optimizer=bool(arguments.use_distributed_optimizer),
        user_instances=int(getattr(arguments, "num_distributed_optimizer_instances", 1) or 1),
        save=arguments.save,
        save_interval=arguments.save_interval,
        lacks_einops=lacks_einops,
        options=tuple((name, getattr(arguments, name)) for name in OPTIONS if getattr(arguments, name, None)),
    )


def _expert_size(arguments: Namespace) -> int | None:
    if not getattr(arguments, "num_experts", None):
        return None
    tensor = getattr(arguments, "expert_tensor_parallel_size", None) or arguments.tensor_model_parallel_size
    used = tensor * arguments.expert_model_parallel_size * arguments.pipeline_model_parallel_size
    return int(arguments.world_size) // int(used)


def check(facts: Facts) -> list[Finding]:
    """Return everything that is wrong, errors first. Empty when the master switch is off and no feature is on."""
    if not facts.flags:
        return []
    found = [
        *_flag_findings(facts),
        *_size_findings(facts),
        *_in_place_findings(facts),
        *_package_findings(facts),
        *_option_findings(facts),
        *_limits(facts),
    ]
    return sorted(found, key=lambda finding: finding.severity is Severity.WARNING)


def _flag_findings(facts: Facts) -> Iterator[Finding]:
    try:
        check_flags(facts.flags)
    except ConfigError as problem:
        yield Finding(Severity.ERROR, problem.message, problem.change)
    if ELASTIC_FLAG in facts.flags:
        yield Finding(
            Severity.ERROR,
            f"{ELASTIC_FLAG} asks for training with fewer ranks, which this release cannot do.",
            f"Remove {ELASTIC_FLAG}.",
        )
    if not facts.save:
        yield Finding(
            Severity.ERROR,
            f"{MASTER_FLAG} needs a folder for the checkpoint that is written after a fault.",
            "Add --save.",
        )


def _size_findings(facts: Facts) -> Iterator[Finding]:
    """Every parameter must have at least two holders, and the copies must be of equal size."""
    if NO_REPLICA_FLAG in facts.flags and facts.effective_copies == 1:
        return
    sizes = [("data-parallel size (context parallelism included)", facts.dense_size, "--tensor-model-parallel-size")]
    if facts.expert_size is not None:
        sizes.append(("expert data-parallel size", facts.expert_size, "--expert-model-parallel-size"))
    copies = facts.effective_copies
    for name, size, flag in sizes:
        fewer = f"Use more ranks, a smaller {flag}, or {NO_REPLICA_FLAG}."
        if size == 1:
            yield Finding(
                Severity.ERROR,
                f"The {name} is 1: the optimizer state of a rank exists once, and is lost with the rank.",
                fewer,
            )
        elif facts.distributed_optimizer and size % copies:
            yield Finding(
                Severity.ERROR,
                f"The {name} is {size}, which is not divisible by the {copies} copies of the optimizer state.",
                f"{fewer} The number of copies is TFT_REPLICAS (or --num-distributed-optimizer-instances).",
            )


def _in_place_findings(facts: Facts) -> Iterator[Finding]:
    """What a rank that is restarted alone could not come back from."""
    flags = sorted(facts.flags & {HBM_FLAG, REBOOT_FLAG})
    if flags and dict(facts.options).get("data_parallel_random_init"):
        yield Finding(
            Severity.ERROR,
            f"--data-parallel-random-init does not go with {' '.join(flags)}: the random generators of a rank are "
            "taken from its replica, and this option makes them differ.",
            f"Remove --data-parallel-random-init, or {' '.join(flags)}.",
        )


def _package_findings(facts: Facts) -> Iterator[Finding]:
    if facts.lacks_einops and facts.distributed_optimizer and facts.effective_copies > 1:
        yield Finding(
            Severity.ERROR,
            "Megatron builds the groups of the optimizer copies with the package einops, which is not installed.",
            f"Run `pip install einops`, or add {NO_REPLICA_FLAG}.",
        )


def _option_findings(facts: Facts) -> Iterator[Finding]:
    options = dict(facts.options)
    for name, (flag, why) in REFUSED.items():
        if options.get(name):
            yield Finding(Severity.ERROR, f"{flag} does not go with {MASTER_FLAG}: {why}.", f"Remove {flag}.")
    optimizer = str(options.get("optimizer", "adam"))
    if "muon" in optimizer and not options.get("use_layer_wise_distributed_optimizer"):
        yield Finding(
            Severity.ERROR,
            f"--optimizer {optimizer} does not go with {MASTER_FLAG}: its state is not copied.",
            "Use --optimizer adam or sgd.",
        )
    form = options.get("ckpt_format", FORMATS[0])
    if form not in FORMATS:
        yield Finding(
            Severity.ERROR,
            f"--ckpt-format {form} cannot be written without the ranks that were lost.",
            f"Use --ckpt-format {' or '.join(FORMATS)}.",
        )
    if int(options.get("gtp_weight_remat_size", 1)) > 1 and facts.effective_copies > 1:
        yield Finding(
            Severity.ERROR,
            "Megatron does not combine --tensor-parallel-num-weight-shards with copies of the optimizer state.",
            f"Remove --tensor-parallel-num-weight-shards, or add {NO_REPLICA_FLAG}.",
        )


def _limits(facts: Facts) -> Iterator[Finding]:
    """What works less well than the user may think."""
    options = dict(facts.options)
    if NO_REPLICA_FLAG in facts.flags and facts.distributed_optimizer and facts.effective_copies == 1:
        yield Finding(
            Severity.WARNING,
            f"{NO_REPLICA_FLAG}: every rank is the only holder of its optimizer shard. A checkpoint of the last step "
            "can be written while all ranks live (an exception, SIGTERM); after the loss of a rank the job can only "
            "resume from the last periodic checkpoint.",
            f"Remove {NO_REPLICA_FLAG}, or set --save-interval to what you can afford to lose.",
        )
        if not facts.save_interval:
            yield Finding(
                Severity.ERROR,
                f"{NO_REPLICA_FLAG} lives on periodic checkpoints, and there are none.",
                "Add --save-interval.",
            )
    flags = sorted(facts.flags & {REBOOT_FLAG, NO_REPLICA_FLAG})
    if flags and options.get("dataloader_type") == "external":
        yield Finding(
            Severity.WARNING,
            "--dataloader-type external: the data cannot be read again from a given sample on, so no lost process is "
            "started anew and no checkpoint is loaded in place; such a fault leads to a checkpoint and the end "
            f"({' '.join(flags)} has no effect on it).",
            "Nothing, or use --dataloader-type single or cyclic.",
        )
    if options.get("async_save"):
        yield Finding(
            Severity.WARNING,
            "--async-save: a periodic checkpoint that is still being written when a fault strikes stays incomplete; "
            "the next one is complete.",
            "Nothing, or remove --async-save.",
        )
    if options.get("log_params_norm") and facts.distributed_optimizer and facts.effective_copies > 1:
        yield Finding(
            Severity.WARNING,
            f"--log-params-norm: Megatron sums the norm over all {facts.effective_copies} copies of the optimizer "
            "shards, so that the logged norm is too large. Training is not affected.",
            "Nothing, or remove --log-params-norm.",
        )


def raise_errors(findings: Sequence[Finding]) -> None:
    """Raise all errors at once.

    Raises:
        ConfigError: what is wrong and what to change, a line for each.
    """
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    if not errors:
        return
    lines = "".join(f"\n  - {finding.message} {finding.change}" for finding in errors)
    raise ConfigError(f"{MASTER_FLAG}: training cannot start.{lines}")


def check_writable(save: str) -> None:
    """A folder that cannot be written must not be found out about when a fault makes it needed.

    Raises:
        ConfigError: it cannot.
    """
    try:
        Path(save).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=save):
            pass
    except OSError as problem:
        raise ConfigError(
            f"{MASTER_FLAG}: --save {save} cannot be written ({problem.strerror or problem}), and the dying-gasp "
            "checkpoint goes there.",
            change="Change --save, or the permissions of the folder.",
        ) from problem


def prepare(arguments: Namespace, config: Config, *, lacks_einops: bool = False) -> None:
    """Check the arguments and switch the replica layout on.

    Raises:
        ConfigError: training cannot start with these arguments.
    """
    set_switches(arguments, config)
    facts = facts_of(arguments, config, lacks_einops=lacks_einops)
    findings = check(facts)
    try:
        raise_errors(findings)
        if config.high_availability:
            check_writable(arguments.save)  # on every rank: a refusal on one alone would look like a fault of that rank
    except ConfigError as refusal:
        tell_launcher(str(refusal))
        raise
    if config.rank == 0:
        for finding in findings:
            logger.warning("%s %s", finding.message, finding.change)
    # Its presence tells the optimizer hook that these arguments came through here.
    arguments.tft_copies = facts.effective_copies
    if config.high_availability and facts.distributed_optimizer:
        arguments.num_distributed_optimizer_instances = facts.effective_copies


def patches(config: Config) -> list[Patch]:
    """The hook behind Megatron's own validation."""

    def validate(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = wrapped(*args, **kwargs)
        prepare(arguments, config, lacks_einops=lacks_einops())
        return arguments

    why = "refuses what cannot work, and switches Megatron's replica layout on"
    return [
        Patch(4, "megatron.training.arguments:validate_args", validate, why, ("args", "defaults"), mandatory=False),
        Patch(
            4,
            "megatron.training.yaml_arguments:validate_yaml",
            validate,
            why,
            ("args", "defaults"),
            mandatory=False,
            optional_target=True,
        ),
    ]
