"""Environment variables: out of range, misspelt, or with an effect that the command line does not show."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from mindio_tft_patch.adaptors.doctor.findings import Finding, error, ok, warning
from mindio_tft_patch.adaptors.doctor.storage import nearest_existing
from mindio_tft_patch.config import MASTER_FLAG, Config
from mindio_tft_patch.errors import ConfigError
from mindio_tft_patch.fault_injection import STATE_VARIABLE, VARIABLE, read_schedule
from mindio_tft_patch.protocol.keys import read_keys
from mindio_tft_patch.variables import OF_OUR_LAUNCHER, unknown_variables

AREA = "variables"
# Every other word counts as no, in silence.
_YES_OR_NO = ("MINDIO_FOR_MINDSPORE", "TORCHELASTIC_USE_AGENT_STORE")
_YES_OR_NO_WORDS = ("true", "1", "false", "0", "")


def judge(config: Config | None, environ: Mapping[str, str]) -> Iterator[Finding]:
    """What is wrong with the variables. config: None when the flags make no configuration."""
    found = [*_strange(environ), *_replaced(config), *_words(environ)]
    if config is not None:
        found += [*_injection(config, environ), *_key_file(config), *_log_folder(config)]
    yield from found
    if not found:
        yield ok(AREA, "All variables are known and in range.")


def _strange(environ: Mapping[str, str]) -> Iterator[Finding]:
    for name, near in unknown_variables(environ).items():
        hint = f"Did you mean {near}? " if near else ""
        yield warning(AREA, f"{name}={environ[name]} is not a variable of this product.", f"{hint}Unset or rename it.")
    for name in sorted(OF_OUR_LAUNCHER & set(environ)):
        message = f"{name}={environ[name]}: ttprun sets this variable for its ranks; nobody else must."
        yield warning(AREA, message, f"Unset {name}.")


def _replaced(config: Config | None) -> Iterator[Finding]:
    """Values that the job will replace by the default."""
    for message in config.warnings if config else ():
        name = message.partition("=")[0].partition(":")[0]
        more = ", or add the flags, to have them in one place" if name == "HIGH_AVAILABILITY" else ""
        yield warning(AREA, message, f"Change or unset {name}{more}.")


def _words(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Values that are words, and are taken as they are."""
    for name in _YES_OR_NO:
        if environ.get(name, "").lower() not in _YES_OR_NO_WORDS:
            message = f"{name}={environ[name]!r} is neither True nor False, and counts as False."
            yield warning(AREA, message, f"Set {name} to True or False, or unset it.")
    address = environ.get("MASTER_ADDR", "")
    if any(character.isspace() or character == "/" for character in address):
        yield error(AREA, f"MASTER_ADDR={address!r} is not an address.", "Change or unset MASTER_ADDR.")


def _injection(config: Config, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Faults on purpose, which a shell may still have from an earlier drill."""
    text = environ.get(VARIABLE, "")
    if not text:
        return
    change = f"Unset {VARIABLE}, unless you want these faults."
    if not config.high_availability:
        yield warning(AREA, f"{VARIABLE} is set, but without {MASTER_FLAG} nobody reads it.", change)
        return
    try:
        faults = read_schedule(text)
    except ConfigError as problem:
        yield error(AREA, f"{problem.message} The job would refuse to start.", f"{problem.change} Or unset {VARIABLE}.")
        return
    if not faults:
        return
    yield warning(AREA, f"{VARIABLE} is set: {len(faults)} fault(s) will be injected on purpose: {text}", change)
    strangers = sorted({fault.rank for fault in faults if not 0 <= fault.rank < config.world_size})
    if strangers and config.world_size:
        named = ", ".join(map(str, strangers))
        message = f"{VARIABLE} names rank {named}, but the job has {config.world_size} rank(s): nothing happens there."
        yield warning(AREA, message, f"Name ranks from 0 to {config.world_size - 1}.")
    folder = environ.get(STATE_VARIABLE)
    if folder and (trouble := _no_folder(Path(folder))):
        message = f"{STATE_VARIABLE}={folder} is to remember which faults have happened, but {trouble}."
        yield error(AREA, message, f"Change or unset {STATE_VARIABLE}.")


def _key_file(config: Config) -> Iterator[Finding]:
    if config.keys_path is None:
        return
    try:
        read_keys(config.keys_path)
    except ConfigError as problem:
        if config.controller_of_cluster and config.encrypted:
            yield error(AREA, problem.message, problem.change)
        else:
            yield warning(
                AREA, f"{problem.message} This job makes keys of its own.", f"{problem.change} Or unset TFT_KEYS."
            )


def _log_folder(config: Config) -> Iterator[Finding]:
    trouble = "" if config.log_stdout or not config.high_availability else _no_folder(config.log_path)
    if trouble:
        message = f"TTP_LOG_PATH: no log can be written into {config.log_path}: {trouble}; training goes on without."
        yield warning(AREA, message, "Make it writable, or set TTP_LOG_PATH to another folder.")


def _no_folder(path: Path) -> str:
    """Why files cannot be written into a folder that may not be there yet; empty: they can."""
    nearest = nearest_existing(path)
    if not nearest.is_dir():
        return f"{nearest} is not a folder"
    return "" if os.access(nearest, os.W_OK | os.X_OK) else f"{nearest} is not writable"
