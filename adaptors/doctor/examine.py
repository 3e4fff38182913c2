"""`mindio-tft doctor`: examines a training command without starting it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mindio_tft_patch.adaptors.doctor import (
    network,
    outcomes,
    own_trainer,
    reading,
    script,
    settings,
    shell_script,
    sizes,
    software,
    storage,
)
from mindio_tft_patch.adaptors.doctor.command import TORCHRUN, TTPRUN, Command, Launch, read_command
from mindio_tft_patch.adaptors.doctor.findings import Finding, Level, error, ok, warning
from mindio_tft_patch.adaptors.doctor.layout import Layout, layout_of
from mindio_tft_patch.adaptors.doctor.megatron_words import completed
from mindio_tft_patch.adaptors.doctor.outcomes import Job, Outcome
from mindio_tft_patch.adaptors.megatron import validate
from mindio_tft_patch.config import MASTER_FLAG, Config, read_config
from mindio_tft_patch.errors import ConfigError

# Areas of findings that say what would run. Errors in others (a port, the disk, a version) leave the table as it is.
_WHAT_THE_JOB_IS = ("command", "flags", "topology")
_ADDRESSES = ("TTP_ADDR", "CONTROLLER_ADDR", "PROCESSOR_ADDR")


@dataclass(frozen=True)
class Report:
    """What the doctor found.

    faults: what each kind of fault will lead to, once the errors are corrected; empty where they leave it open.
    """

    launcher: str
    launch: Launch
    findings: tuple[Finding, ...]
    faults: tuple[Outcome, ...] = ()

    @property
    def errors(self) -> int:
        """Number of findings because of which the job will not hold."""
        return sum(finding.level is Level.ERROR for finding in self.findings)

    @property
    def warnings(self) -> int:
        """Number of findings that the user should know."""
        return sum(finding.level is Level.WARNING for finding in self.findings)


@dataclass(frozen=True)
class _Case:
    """Everything that is known about the job."""

    command: Command
    read: reading.Reading
    config: Config
    arguments: Mapping[str, Any]
    facts: validate.Facts
    layout: Layout | None
    environ: Mapping[str, str]
    flag_findings: tuple[Finding, ...] = ()

    @property
    def launch(self) -> Launch:
        return self.read.launch


def examine(words: Sequence[str], environ: Mapping[str, str]) -> Report:
    """Examine a training command, as the words of a command line."""
    command = read_command(words)
    if not command.launcher:
        message = f"{' '.join(words[:3])} ... is none of ttprun, torchrun and python: ranks are not started by it."
        change = "Give the command that starts the ranks, as it stands in your script or job file."
        if shell_script.is_shell_script(words):
            message, change = f"{' '.join(words[:3])} is a shell script.", shell_script.advice(words)
        return Report("", Launch(), (error("command", message, change),))
    whole = {**environ, **command.assignments}
    case = _case(command, reading.ask(command, whole), whole)
    findings = sorted(dict.fromkeys(_findings(case)), key=lambda finding: list(Level)[::-1].index(finding.level))
    return Report(command.launcher, case.launch, tuple(findings), tuple(_faults(case, findings)))


def _faults(case: _Case, findings: Sequence[Finding]) -> list[Outcome]:
    """The table. None where it would rest on what an error leaves open."""
    if case.config.own_handlers:
        return []
    job = _job(case)
    open_questions = any(one.level is Level.ERROR and one.area in _WHAT_THE_JOB_IS for one in findings)
    if open_questions or (job.protected and job.layout is None):
        return []
    return outcomes.foresee(job)


def _case(command: Command, read: reading.Reading, environ: Mapping[str, str]) -> _Case:
    launch = read.launch
    trouble: tuple[Finding, ...] = ()
    try:
        config = read_config(launch.script_args, environ)
    except ConfigError as problem:
        trouble = (error("flags", problem.message, problem.change),)
        config = read_config([], {name: value for name, value in environ.items() if name != "HIGH_AVAILABILITY"})
    config = replace(config, world_size=launch.world_size, local_world_size=launch.ranks_per_node)
    if config.own_handlers:
        flags = validate.facts_of(Namespace(**completed({}, (), launch.world_size)), config).flags
        return _Case(command, read, config, {}, validate.Facts(flags=flags), None, environ, trouble)
    arguments = completed(read.arguments, launch.script_args, launch.world_size)
    facts = validate.facts_of(Namespace(**arguments), config, lacks_einops=read.lacks_einops)
    layout = layout_of(arguments, launch.world_size, launch.ranks_per_node, facts.effective_copies)
    if not config.high_availability and facts.user_instances == 1:
        layout = layout_of(arguments, launch.world_size, launch.ranks_per_node, 1)
    return _Case(command, read, config, arguments, facts, layout, environ, trouble)


def _findings(case: _Case) -> Iterator[Finding]:
    protected = case.config.high_availability
    yield from _judge_launch(case)
    if case.read.launch_refused:  # every other word of the command may stand for something else
        yield from software.judge(case.read, case.command.launcher, case.environ)
        yield from settings.judge(case.config, case.environ)
        return
    # Where nothing of Megatron is patched, an import may stand anywhere; the SDK's names need none at all.
    patches = case.config.adaptor == "megatron" and case.config.mindspeed == "plugin"
    yield from script.judge_script(case.launch, protected=protected and patches, environ=case.environ)
    yield from case.flag_findings
    yield from _judge_flags(case)
    yield from own_trainer.judge(case.read, case.config) if case.config.own_handlers else _judge_layout(case)
    yield from software.judge(case.read, case.command.launcher, case.environ)
    yield from software.judge_in_place(case.read, case.config)
    yield from _judge_device(case)
    given = any(case.environ.get(name) for name in _ADDRESSES)
    situation = network.Situation(case.config, case.launch, case.command.launcher, given)
    yield from network.judge(situation, network.ThisMachine())
    if protected and case.launch.world_size and case.launch.node_rank == 0:
        yield from network.judge_descriptors(case.launch.world_size, case.launch.nodes)
    if case.arguments.get("save"):
        yield from storage.judge(storage.look_at(Path(case.arguments["save"])), _plan(case))
    yield from script.judge_data(case.arguments)
    yield from settings.judge(case.config, case.environ)


def _judge_launch(case: _Case) -> Iterator[Finding]:
    launch, launcher = case.launch, case.command.launcher
    if case.command.before:
        yield warning("command", f"`{' '.join(case.command.before)}` is not looked at.", "Nothing.")
    if case.read.launch_trouble:
        yield error(
            "command",
            f"{launcher} does not understand its options: {case.read.launch_trouble.rstrip('?.')}"
            f"{'?' if case.read.launch_trouble.endswith('?') else '.'}",
            "Correct the options in front of the script.",
        )
    elif launch.ranks_per_node < 1:
        yield error("command", "The number of ranks on a node is not known here.", "Give --nproc-per-node a number.")
    if case.read.launch_refused:
        yield warning(
            "command",
            "Not examined, because it depends on these options: the script and its flags, topology, network, save "
            "folder, data, and what a fault will lead to.",
            "Run the doctor again with correct options.",
        )
        return
    if not launch.world_size:
        yield warning(
            "command",
            "Not examined, because it depends on the number of ranks: topology, the validation of Megatron, and what a "
            "fault will lead to.",
            "Run the doctor where the job will run, or give --nproc-per-node a number.",
        )
    if launch.nodes_max != launch.nodes:
        yield warning(
            "command",
            f"The job may run on {launch.nodes} to {launch.nodes_max} nodes; looked at here: {launch.nodes}.",
            "Give --nnodes one number, or run the doctor for each.",
        )
    if not case.config.high_availability:
        return
    if launch.run_path and launcher == TTPRUN:
        yield error("command", "--run-path starts ranks that cannot be watched one by one.", "Remove --run-path.")
    if launcher == TORCHRUN:
        yield warning(
            "command",
            "Under torchrun the controller lives in rank 0, whose death cannot be survived, and after a death the "
            "others get SIGTERM and 30 s.",
            "Start the job with ttprun, which takes the same options.",
        )
    elif launcher != TTPRUN:
        yield warning(
            "command",
            f"Under {launcher} the controller lives in rank 0, whose death cannot be survived, and nobody tells it at "
            "once when another rank dies.",
            "Start the ranks with ttprun.",
        )


def _judge_flags(case: _Case) -> Iterator[Finding]:
    read = case.read
    if not case.config.high_availability and not case.flag_findings:
        yield warning("flags", "The job is not protected: no fault leads to a checkpoint.", f"Add {MASTER_FLAG}.")
    if read.trouble and not case.config.own_handlers:
        yield error(
            "flags",
            f"Megatron's own parser could not be asked ({read.trouble}); only a few flags were read.",
            "Make `import megatron.training` work here, or run the doctor where the job will run.",
        )
    if read.refusal:
        yield error("flags", f"Megatron refuses the arguments: {read.refusal}", "Change the flag that it names.")
    known = [f"--{name.replace('_', '-')}" for name in read.arguments]
    yield from script.judge_standby(case.launch, case.config)
    yield from script.judge_words(read.unknown, known, case.config)
    for found in validate.check(case.facts):
        if not case.launch.world_size and found in _size_errors(case):
            continue
        level = Level.ERROR if found.severity is validate.Severity.ERROR else Level.WARNING
        yield Finding(level, "flags", found.message, found.change)


def _judge_layout(case: _Case) -> Iterator[Finding]:
    launch, layout = case.launch, case.layout
    names = (("TP", "tensor_model"), ("PP", "pipeline_model"), ("CP", "context"), ("DP", "data"))
    sizes_of = [f"{short} {case.arguments.get(f'{name}_parallel_size', 1)}" for short, name in names]
    ranks = f"{launch.world_size} ranks on {launch.nodes} node(s): {' x '.join(sizes_of)}"
    if not launch.world_size:
        return
    if layout is None:
        if not any(finding.severity is validate.Severity.ERROR for finding in _size_errors(case)):
            yield error("topology", f"{ranks} does not come out even.", "Change --nproc-per-node or a parallel size.")
        return
    fewest = layout.fewest_holders
    holders = ", ".join(map(str, fewest.ranks[:8]))
    yield ok("topology", f"{ranks}; each optimizer shard on {len(fewest.ranks)} rank(s), the first on {holders}.")
    alone = [node for node in range(layout.nodes) if layout.alone_on(node)]
    if case.config.high_availability and layout.nodes > 1 and alone and len(fewest.ranks) > 1:
        yield warning(
            "topology",
            f"Node {alone[0]} holds all copies of some optimizer shards: its loss costs the steps since the last "
            "periodic checkpoint.",
            _spread(case, len(fewest.ranks)),
        )


def _spread(case: _Case, copies: int) -> str:
    """How to bring the copies of a shard to different nodes."""
    arguments = {**case.arguments, "use_tp_pp_dp_mapping": True}
    other = layout_of(arguments, case.launch.world_size, case.launch.ranks_per_node, copies)
    if other is not None and not any(other.alone_on(node) for node in range(other.nodes)):
        return "Add --use-tp-pp-dp-mapping, which puts the copies on different nodes."
    return "Use more nodes, so that the copies lie on different ones."


def _size_errors(case: _Case) -> list[validate.Finding]:
    return [found for found in validate.check(case.facts) if "data-parallel size" in found.message]


def _judge_device(case: _Case) -> Iterator[Finding]:
    if case.read.accelerator or not case.read.torch:
        return
    backend, device = case.arguments.get("distributed_backend"), case.config.device
    asked, choice = f", and --distributed-backend is {backend}", "use --distributed-backend gloo"
    if case.config.own_handlers:  # such a trainer has no such argument
        asked, choice = "", "set TFT_DEVICE=cpu"
    if device in ("cuda", "npu"):
        yield error("device", f"TFT_DEVICE={device}, but torch finds no such device here.", "Unset TFT_DEVICE.")
    elif device == "cpu" or backend == "gloo":
        yield ok("device", "No accelerator: the CPU stands in for it, over gloo.")
    else:
        yield warning(
            "device",
            f"No accelerator is present here{asked}.",
            f"Run the doctor where the job will run; to train on the CPU, {choice}.",
        )


def _plan(case: _Case) -> storage.Plan:
    interval, iterations = case.arguments.get("save_interval"), case.arguments.get("train_iters")
    return storage.Plan(
        load=case.arguments.get("load"),
        checkpoint_bytes=sizes.checkpoint_bytes(case.arguments),
        saves=iterations // interval if interval and iterations else None,
        dump_seconds=case.config.dump_timeout_seconds,
        nodes=case.launch.nodes,
        protected=case.config.high_availability,
    )


def _job(case: _Case) -> Job:
    refused = any(found.severity is validate.Severity.ERROR for found in validate.check(case.facts))
    refused = refused or any(found.level is Level.ERROR for found in software.judge_in_place(case.read, case.config))
    return Job(
        protected=case.config.high_availability,
        launcher=case.command.launcher,
        layout=None if refused else case.layout,
        saves=bool(case.arguments.get("save")),
        periodic=bool(case.arguments.get("save_interval")),
        patience_seconds=case.config.dump_timeout_seconds,
        hang_seconds=case.config.hang_seconds,
        repairs=case.config.hbmfault_repair,
        reboots=case.config.worker_reboot,
        reloads=case.config.no_replica,
        placeable=case.arguments.get("dataloader_type") != "external",
        return_seconds=case.config.return_seconds,
        budget=case.config.restart_budget,
        static=case.launch.static,
    )
