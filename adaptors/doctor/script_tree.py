"""Runs a command, and ends when the last process has ended that came from it; the doctor starts it by its path.

Whether anything still runs is a question for the kernel: what is orphaned below becomes a child of this process, so
it has no children exactly when nothing is left. A look into /proc would miss a process in the midst of its exec.

usage: script_tree.py FILE COMMAND...
FILE gets the reason when the command cannot be started. SIGTERM kills the command's process group. Exit code: the
command's, 128 + N when signal N ended it.
"""

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_IGNORED_BY_PYTHON = [signal.SIGPIPE, signal.SIGXFSZ]  # and so by what it starts, unless told otherwise


def main(reason: str, words: list[str]) -> int:
    """Run it and wait for all of it."""
    with contextlib.suppress(OSError, AttributeError):  # elsewhere than on Linux the command alone is waited for
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        # Of a process group of its own, so that a script's `kill 0` does not end this process.
        command = os.posix_spawnp(words[0], words, os.environ, setpgroup=0, setsigdef=_IGNORED_BY_PYTHON)
    except OSError as problem:
        with open(reason, "w") as file:
            file.write(str(problem.strerror))
        return 127
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(command, signal.SIGKILL))
    code = 0
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            return code
        if pid == command:
            code = os.waitstatus_to_exitcode(status)
            code = code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
