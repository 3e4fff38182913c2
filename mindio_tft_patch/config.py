"""One frozen Config; the only reader of the environment and of argv.

Flags that are absent, a variable that is out of range: see docs/flags.md. A variable out of range never ends a job: it
is replaced by its default, with a warning that the caller logs (`Config.warnings`).
"""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mindio_tft_patch.errors import ConfigError

MASTER_FLAG = "--enable-high-availability"
HBM_FLAG = "--enable-hbmfault-repair"
REBOOT_FLAG = "--enable-worker-reboot"
NO_REPLICA_FLAG = "--distributed-optimizer-no-replica"
ELASTIC_FLAG = "--enable-elastic-training"
FEATURE_FLAGS = (HBM_FLAG, REBOOT_FLAG, NO_REPLICA_FLAG, ELASTIC_FLAG)

_SWITCHES = {"dump": MASTER_FLAG, "retry": HBM_FLAG, "recover": REBOOT_FLAG}


@dataclass(frozen=True)
class Config:
    """Everything that the product takes from outside. Durations in seconds.

    Attributes:
        high_availability: master switch; nothing is patched without it.
        controller_bind: address that the controller binds.
        controller_address: address that processors and agents connect to.
        dump_timeout_seconds: time that the launcher leaves the survivors after a fault (TTP_OT).
        phase_timeout_seconds: time for one recovery phase (TTP_NORMAL_ACTION_TIME_LIMIT).
        hang_seconds: least time without progress that counts as a hang; 10 median steps if that is longer.
        collect_seconds: window in which reports are gathered before the decision.
        replicas: copies of each optimizer shard (N).
        restart_budget: recoveries in place over the life of the job; the next fault leads to a checkpoint and the end.
        return_seconds: how long the other ranks wait for a process that is started anew.
        scrub_interval: steps between two comparisons of the copies of each shard; 0: none.
        scrub_action: what follows when they differ: warn, dump or stop.
        adaptor: whose handlers carry recoveries out: megatron (installed by the import), or own (the framework's).
        mindspeed: who protects a job of MindSpeed-LLM: plugin or sdk (its own feature, as a client of the SDK's names).
        old_names: whose modules `import mindio_ttp` finds: ours, real, or auto (a real one when it is installed).
        mindspore: the framework is MindSpore; counts for the functions of the SDK only, as the next two do.
        framework_type: TTP_FRAMEWORK_TYPE; 1: `replica_shift` says which ranks hold the same.
        stops_before_dump: TTP_STOP_CLEAN_BEFORE_DUMP; the callbacks stop and clean run before a checkpoint is written.
        controller_external: the controller runs in the launcher, not in rank 0.
        keys_path: key file of a controller that has no store in common with the ranks (protocol.keys).
        warnings: what was replaced by a default, and why.
    """

    high_availability: bool = False
    hbmfault_repair: bool = False
    worker_reboot: bool = False
    no_replica: bool = False
    elastic_training: bool = False

    controller_bind: str = "127.0.0.1"
    controller_address: str = "127.0.0.1"
    port: int = 8000
    encrypted: bool = True
    keys_path: Path | None = None
    retry_times: int = 10
    dump_timeout_seconds: float = 120.0
    phase_timeout_seconds: float = 180.0
    cluster_manager_wait_seconds: float = 30.0
    heartbeat_seconds: float = 1.0
    heartbeats_missed: int = 3
    hang_seconds: float = 60.0
    collect_seconds: float = 0.15
    replicas: int = 2
    restart_budget: int = 100
    return_seconds: float = 300.0
    scrub_interval: int = 0
    scrub_action: str = "warn"
    device: str = "auto"
    adaptor: str = "megatron"
    mindspeed: str = "plugin"
    old_names: str = "auto"
    mindspore: bool = False
    framework_type: int = 0
    stops_before_dump: bool = False

    log_path: Path = Path("logs")
    log_level: str = "INFO"
    log_per_process: bool = True
    log_stdout: bool = False

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 0  # 0: not known
    master_address: str = "127.0.0.1"
    master_port: int = 29500
    controller_external: bool = False
    started_by_ttprun: bool = False
    agent_store: bool = False
    restart_count: int = 0
    argv: tuple[str, ...] = field(default=(), repr=False)
    warnings: tuple[str, ...] = ()

    @property
    def copies(self) -> int:
        """Optimizer copies that the job keeps: `replicas`, or 1 with --distributed-optimizer-no-replica."""
        return 1 if self.no_replica else self.replicas

    @property
    def own_handlers(self) -> bool:
        """The framework brings handlers of its own (adaptors/porting), and nothing of Megatron is patched."""
        return self.adaptor == "own"

    @property
    def in_place(self) -> bool:
        """A flag asks for recoveries that keep the job up."""
        return self.hbmfault_repair or self.worker_reboot or self.no_replica

    @property
    def controller_of_cluster(self) -> bool:
        """The controller is the cluster manager's, which has no store in common with the ranks."""
        return self.controller_external and not self.started_by_ttprun


_SHOWN = 100  # of a value that cannot be used


class _Reader:
    """Reads variables with ranges; collects a warning for each that is replaced by its default."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.warnings: list[str] = []

    def warn(self, message: str) -> None:
        self.warnings.append(message)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        text = self.environ.get(name)
        if text is None or text == "":
            return default
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            self.warn(
                f"{name}={_shortened(text)} is not a number from {low:g} to {high:g}; using the default {default:g}."
            )
            return default
        return value

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        text = self.environ.get(name)
        if text is None or text == "":
            return default
        try:
            value = int(text) if text.strip().isdecimal() else low - 1
        except ValueError:  # so many digits that Python does not read them
            value = low - 1
        if not low <= value <= high:
            self.warn(
                f"{name}={_shortened(text)} is not a whole number from {low} to {high}; using the default {default}."
            )
            return default
        return value

    def choice(self, name: str, default: str, allowed: Sequence[str]) -> str:
        text = self.environ.get(name)
        if text is None or text == "":
            return default
        if text not in allowed:
            self.warn(f"{name}={text!r} is none of {', '.join(allowed)}; using the default {default}.")
            return default
        return text

    def address(self, name: str, default: str) -> str:
        text = self.environ.get(name, "").strip()
        if not text:
            return default
        try:
            unusable = ipaddress.ip_address(text.strip("[]")).is_unspecified
        except ValueError:
            unusable = any(character.isspace() or character == "/" for character in text)
        if unusable:
            self.warn(f"{name}={text!r} is not an address that ranks can connect to; using {default}.")
            return default
        return text.strip("[]")


def _shortened(text: str) -> str:
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r} and {len(text) - _SHOWN} characters more"


def flags_of(argv: Sequence[str]) -> frozenset[str]:
    """Feature flags present in a command line."""
    return frozenset(word for word in argv if word == MASTER_FLAG or word in FEATURE_FLAGS)


def _switched_by_environment(reader: _Reader, flags: frozenset[str]) -> frozenset[str]:
    text = reader.environ.get("HIGH_AVAILABILITY", "")
    wanted = set(flags)
    for word in filter(None, (part.strip() for part in text.split(","))):
        flag = _SWITCHES.get(word)
        if word == "exit":
            continue  # a cluster manager lists it too; it is always possible
        if flag is None:
            reader.warn(f"HIGH_AVAILABILITY: {word!r} is none of {', '.join(_SWITCHES)}; ignored.")
            continue
        wanted.add(MASTER_FLAG)
        wanted.add(flag)
    added = sorted(wanted - flags)
    if added:
        reader.warn(f"HIGH_AVAILABILITY={text} switches on {' '.join(added)}, which the command line does not have.")
    return frozenset(wanted)


def _log_path(reader: _Reader) -> Path:
    path = Path(reader.environ.get("TTP_LOG_PATH") or "logs")
    try:
        linked = path.is_symlink()
    except OSError as problem:  # a name that is too long for any file
        reader.warn(f"TTP_LOG_PATH cannot be a folder ({problem.strerror}); using logs.")
        return Path("logs")
    if linked:
        reader.warn(f"TTP_LOG_PATH={path} is a symbolic link, which a log folder must not be; using logs.")
        return Path("logs")
    return path


def check_flags(flags: frozenset[str]) -> None:
    """Refuse combinations of flags that make no sense.

    Raises:
        ConfigError: a feature flag without the master switch.
    """
    lonely = sorted(flags - {MASTER_FLAG})
    if lonely and MASTER_FLAG not in flags:
        raise ConfigError(
            f"{' '.join(lonely)} has no effect without the master switch.",
            change=f"Add {MASTER_FLAG}, or remove {' '.join(lonely)}.",
        )


def read_config(argv: Sequence[str], environ: Mapping[str, str]) -> Config:
    """Read flags and variables.

    Raises:
        ConfigError: a feature flag without the master switch.
    """
    reader = _Reader(environ)
    flags = _switched_by_environment(reader, flags_of(argv))
    check_flags(flags)
    base = reader.address("TTP_ADDR", "127.0.0.1")
    return Config(
        high_availability=MASTER_FLAG in flags,
        hbmfault_repair=HBM_FLAG in flags,
        worker_reboot=REBOOT_FLAG in flags,
        no_replica=NO_REPLICA_FLAG in flags,
        elastic_training=ELASTIC_FLAG in flags,
        controller_bind=reader.address("CONTROLLER_ADDR", base),
        controller_address=reader.address("PROCESSOR_ADDR", base),
        port=reader.integer("TTP_PORT", 8000, 1024, 65535),
        encrypted=reader.choice("TTP_TLS", "1", ("0", "1")) == "1",
        keys_path=Path(environ["TFT_KEYS"]) if environ.get("TFT_KEYS") else None,
        retry_times=reader.integer("TTP_RETRY_TIMES", 10, 1, 300),
        dump_timeout_seconds=reader.number("TTP_OT", 120.0, 1.0, 86400.0),
        phase_timeout_seconds=reader.number("TTP_NORMAL_ACTION_TIME_LIMIT", 180.0, 30.0, 1800.0),
        cluster_manager_wait_seconds=reader.number("MINDIO_WAIT_MINDX_TIME", 30.0, 1.0, 3600.0),
        heartbeat_seconds=reader.number("TFT_HEARTBEAT_SECONDS", 1.0, 0.05, 60.0),
        heartbeats_missed=reader.integer("TFT_HEARTBEATS_MISSED", 3, 2, 1000),
        hang_seconds=reader.number("TFT_HANG_SECONDS", 60.0, 1.0, 86400.0),
        collect_seconds=reader.number("TFT_COLLECT_SECONDS", 0.15, 0.0, 60.0),
        replicas=reader.integer("TFT_REPLICAS", 2, 2, 16),
        restart_budget=reader.integer("TFT_RESTART_BUDGET", 100, 0, 10**5),
        return_seconds=reader.number("TFT_RETURN_SECONDS", 300.0, 1.0, 86400.0),
        scrub_interval=reader.integer("TFT_SCRUB_INTERVAL", 0, 0, 10**9),
        scrub_action=reader.choice("TFT_SCRUB_ACTION", "warn", ("warn", "dump", "stop")),
        device=reader.choice("TFT_DEVICE", "auto", ("auto", "cpu", "cuda", "npu")),
        adaptor=reader.choice("TFT_ADAPTOR", "megatron", ("megatron", "own")),
        mindspeed=reader.choice("TFT_MINDSPEED", "plugin", ("plugin", "sdk")),
        old_names=reader.choice("TFT_MINDIO_TTP", "auto", ("auto", "ours", "real")),
        mindspore=environ.get("MINDIO_FOR_MINDSPORE", "").lower() in ("true", "1"),
        framework_type=reader.integer("TTP_FRAMEWORK_TYPE", 0, 0, 1),
        stops_before_dump=reader.choice("TTP_STOP_CLEAN_BEFORE_DUMP", "0", ("0", "1")) == "1",
        log_path=_log_path(reader),
        log_level=reader.choice("TTP_LOG_LEVEL", "INFO", ("DEBUG", "INFO", "WARNING", "ERROR")),
        log_per_process=reader.choice("TTP_LOG_MODE", "PER_PROC", ("ONLY_ONE", "PER_PROC")) == "PER_PROC",
        log_stdout=reader.choice("TTP_LOG_STDOUT", "0", ("0", "1")) == "1",
        rank=reader.integer("RANK", 0, 0, 10**6),
        world_size=reader.integer("WORLD_SIZE", 1, 1, 10**6),
        local_rank=reader.integer("LOCAL_RANK", 0, 0, 10**6),
        local_world_size=reader.integer("LOCAL_WORLD_SIZE", 0, 0, 10**6),
        master_address=environ.get("MASTER_ADDR") or "127.0.0.1",
        master_port=reader.integer("MASTER_PORT", 29500, 1, 65535),
        started_by_ttprun=environ.get("TFT_CONTROLLER") == "agent",
        controller_external=environ.get("TFT_CONTROLLER") == "agent" or bool(environ.get("MINDX_TASK_ID")),
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in ("true", "1"),
        restart_count=reader.integer("TORCHELASTIC_RESTART_COUNT", 0, 0, 10**6),
        argv=tuple(argv),
        warnings=tuple(reader.warnings),
    )


def process_config(environ: Mapping[str, str], argv: Sequence[str] | None = None) -> Config:
    """The configuration of this process."""
    return read_config(sys.argv[1:] if argv is None else argv, environ)
