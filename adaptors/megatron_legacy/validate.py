"""Refuses arguments of the Megatron-LM of 2023 with which a fault could not be survived, before training begins."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from mindio_tft_patch.adaptors.megatron import validate
from mindio_tft_patch.adaptors.megatron.arguments import set_switches
from mindio_tft_patch.adaptors.megatron.validate import Facts, Finding, Severity
from mindio_tft_patch.adaptors.megatron_legacy.newer_names import complete_arguments
from mindio_tft_patch.adaptors.refusal import tell_launcher
from mindio_tft_patch.config import ELASTIC_FLAG, HBM_FLAG, MASTER_FLAG, NO_REPLICA_FLAG, REBOOT_FLAG, Config
from mindio_tft_patch.errors import ConfigError

logger = logging.getLogger("mindio_tft_patch.validate")

# attribute of Megatron's arguments: (flag, why it cannot work)
REFUSED: dict[str, tuple[str, str]] = {
    "vision_pretraining": (
        "--vision-pretraining",
        "it changes the model after the update, outside of the optimizer",
    ),
    "adlr_autoresume": ("--adlr-autoresume", "two tools would restart the same job"),
    "lazy_mpu_init": ("--lazy-mpu-init", "the process groups are then made by somebody else"),
}


def around_validate(config: Config) -> Any:
    """Return the wrapper of validate_args."""

    def wrapper(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = wrapped(*args, **kwargs)
        prepare(arguments, config)
        return arguments

    return wrapper


def prepare(arguments: Namespace, config: Config) -> None:
    """Check the arguments.

    Raises:
        ConfigError: training cannot start with these arguments.
    """
    set_switches(arguments, config)
    complete_arguments(arguments)
    findings = [*validate.check(_facts(arguments, config)), *_own_findings(arguments)]
    try:
        validate.raise_errors(findings)
        if config.high_availability:
            validate.check_writable(arguments.save)
    except ConfigError as refusal:
        tell_launcher(str(refusal))
        raise
    for finding in findings if config.rank == 0 else ():
        logger.warning("%s %s", finding.message, finding.change)


def _facts(arguments: Namespace, config: Config) -> Facts:
    switches = {
        MASTER_FLAG: config.high_availability,
        HBM_FLAG: config.hbmfault_repair,
        REBOOT_FLAG: config.worker_reboot,
        NO_REPLICA_FLAG: config.no_replica,
        ELASTIC_FLAG: config.elastic_training,
    }
    looked_at = ("optimizer", "data_parallel_random_init")
    return Facts(
        flags=frozenset(flag for flag, on in switches.items() if on),
        copies=config.copies,
        # Experts of this Megatron are reduced over the data-parallel group like everything else.
        dense_size=arguments.data_parallel_size,
        distributed_optimizer=bool(arguments.use_distributed_optimizer),
        save=arguments.save,
        save_interval=arguments.save_interval,
        options=tuple((name, getattr(arguments, name)) for name in looked_at if getattr(arguments, name, None)),
    )


def _own_findings(arguments: Namespace) -> Iterator[Finding]:
    for name, (flag, why) in REFUSED.items():
        if getattr(arguments, name, False):
            yield Finding(Severity.ERROR, f"{flag} does not go with {MASTER_FLAG}: {why}.", f"Remove {flag}.")
