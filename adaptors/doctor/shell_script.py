"""A training command that stands in a shell script: the script is run with launchers that start nothing.

Only on demand (`mindio-tft doctor --script`): whatever the script does up to its first call is really done; then it is
ended, with all that it has started. In front of its PATH are a `ttprun` and a `torchrun` that write down how they were
called, and end. bash gets functions of these names as well, because a script that activates an environment puts another
folder in front of PATH.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from mindio_tft_patch import proc_stat
from mindio_tft_patch.adaptors.doctor import script_tree
from mindio_tft_patch.adaptors.doctor.command import TORCHRUN, TTPRUN, read_command
from mindio_tft_patch.errors import ConfigError

_SHELLS = frozenset({"sh", "bash", "dash", "ksh", "zsh", "source", "."})
_FUNCTION = "BASH_FUNC_{}%%"  # the name under which bash hands a function on
_SECONDS = 600.0
_LOOK_SECONDS = 0.02
_GRACE_SECONDS = 2.0  # from SIGTERM to SIGKILL
# The first call counts. It is complete when its file has its name.
_STAND_IN = """#!{python} -S
import json, os, sys
own = os.path.dirname(os.path.abspath(__file__))
call = dict(words=[os.path.basename(sys.argv[0]), *sys.argv[1:]], environ=dict(os.environ), folder=os.getcwd())
with open(f"{{own}}/{{os.getpid()}}.part", "w") as file:
    json.dump(call, file)
try:
    os.link(file.name, f"{{own}}/call.json")
except FileExistsError:
    pass
print("mindio-tft doctor: this call is examined, nothing is started", file=sys.stderr)
"""


@dataclass(frozen=True)
class Call:
    """How a script calls the launcher.

    words: the command. environ: variables that the script has set, and all others. folder: where it calls.
    """

    words: tuple[str, ...]
    environ: Mapping[str, str]
    folder: Path


def is_shell_script(words: Sequence[str]) -> bool:
    """Whether a command runs a shell script, and is no launcher itself."""
    if not words or read_command(words).launcher:
        return False
    first = PurePath(words[0])
    if first.name in _SHELLS or first.suffix in (".sh", ".bash"):
        return True
    try:
        with open(first, "rb") as file:
            line = file.readline(200)
    except OSError:
        return False
    return line.startswith(b"#!") and any(PurePath(one).name in _SHELLS for one in line[2:].decode("latin-1").split())


def advice(words: Sequence[str]) -> str:
    """What a user does whose command is a shell script."""
    return (
        f"Run `mindio-tft doctor --script -- {' '.join(words)}`: it runs the script, with a ttprun that starts "
        "nothing; or put `mindio-tft doctor --` in front of ttprun in a copy of it."
    )


def recorded(words: Sequence[str], environ: Mapping[str, str], limit_seconds: float = _SECONDS) -> Call:
    """Run a script and find out how it calls ttprun or torchrun. What it prints goes to standard error.

    Raises:
        ConfigError: it cannot be run, or does not call them.
    """
    shown = " ".join(words)
    with tempfile.TemporaryDirectory(prefix="mindio-tft-doctor-") as name:
        folder = Path(name)
        for launcher in (TTPRUN, TORCHRUN):
            (folder / launcher).write_text(_STAND_IN.format(python=sys.executable))
            (folder / launcher).chmod(0o755)
        functions = {_FUNCTION.format(one): f'() {{ "{folder}/{one}" "$@"; }}' for one in (TTPRUN, TORCHRUN)}
        path = os.pathsep.join([name, environ.get("PATH", os.defpath)])
        found = folder / "call.json"
        reason = folder / "reason"
        process = subprocess.Popen(
            [sys.executable, "-S", script_tree.__file__, str(reason), *words],
            env={**environ, **functions, "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=2,  # the doctor's own output may be JSON
            start_new_session=True,
        )
        try:
            ended = _await_call(process, found, limit_seconds)
        finally:
            # Before the stand-ins go: whoever called a launcher now would find the real one.
            _end(process)
        if reason.exists():
            change = f"Give the script as you start it, such as `bash {shown}`."
            raise ConfigError(f"`{shown}` cannot be run: {reason.read_text()}.", change=change)
        if not found.exists():
            told = (
                f"has called neither ttprun nor torchrun by its bare name; its exit code was {process.returncode}."
                if ended
                else f"has not called ttprun within {limit_seconds:g} s."
            )
            raise ConfigError(
                f"`{shown}` {told}",
                change="Put `mindio-tft doctor --` in front of the command that starts the ranks, in a copy of it.",
            )
        call = json.loads(found.read_text())
    variables = {key: value for key, value in call["environ"].items() if key not in functions}
    kept = [one for one in variables.get("PATH", "").split(os.pathsep) if one != name]
    variables["PATH"] = os.pathsep.join(kept)
    return Call(tuple(call["words"]), variables, Path(call["folder"]))


def _await_call(tree: subprocess.Popen[bytes], found: Path, limit_seconds: float) -> bool:
    """Wait for the first call; it may come from what the script has left running in the background.

    Returns:
        The script, and all that it has started, ended before that.
    """
    deadline = time.monotonic() + limit_seconds
    while not found.exists() and time.monotonic() < deadline:
        if tree.poll() is not None:
            return True
        time.sleep(_LOOK_SECONDS)
    return False


def _end(tree: subprocess.Popen[bytes]) -> None:
    """End the script and whatever it has started, also what has left its session; the tree ends by itself then."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _GRACE_SECONDS
        while tree.poll() is None and time.monotonic() < deadline:
            for pid in _descendants(tree.pid):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            time.sleep(_LOOK_SECONDS)
    if tree.poll() is None:  # a system without /proc
        tree.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            tree.wait(_GRACE_SECONDS)
        tree.kill()
        tree.wait()


def _descendants(ancestor: int) -> set[int]:
    """Processes below another one, as far as one look finds them; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    with contextlib.suppress(FileNotFoundError):
        for one in proc_stat.processes():
            children.setdefault(one.parent, []).append(one.pid)
    found: set[int] = set()
    waiting = [ancestor]
    while waiting:
        new = set(children.get(waiting.pop(), ())) - found
        found |= new
        waiting.extend(new)
    return found
