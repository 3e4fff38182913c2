"""`mindio-tft`: looks at an installation (`patches`), at a job before it starts (`doctor`), puts a job under faults on
purpose (`drill`), and writes the keys of a job whose controller is a cluster manager's (`keys`).

Exit codes: 0 all is well, 1 something will not hold, 2 wrong use of this command.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from mindio_tft_patch.config import read_config
from mindio_tft_patch.errors import TftError

_EXAMPLE = "mindio-tft {} -- ttprun --nproc-per-node 4 pretrain_gpt.py --enable-high-availability ..."


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `mindio-tft`."""
    sys.exit(run(sys.argv[1:] if argv is None else argv, os.environ))


def run(argv: Sequence[str], environ: os._Environ[str] | dict[str, str]) -> int:
    """Run one subcommand; the exit code."""
    # By hand: argparse would drop a "--" that belongs to the training command.
    own = list(argv[: argv.index("--")] if "--" in argv else argv)
    training = list(argv[argv.index("--") + 1 :] if "--" in argv else [])
    parser = _parser()
    options = parser.parse_args(own)
    try:
        if options.subcommand == "patches":
            return _patches(options, environ)
        if options.subcommand == "keys":
            return _keys(options)
        if not training:
            example = _EXAMPLE.format(options.subcommand)
            parser.error(f"the training command is missing; it follows after `--`: {example}")
        if options.subcommand == "drill":
            return _drill(options, training, environ)
        return _doctor(options, training, environ)
    except TftError as problem:
        print(f"mindio-tft: {problem}", file=sys.stderr)
        return 1
    except FileNotFoundError as problem:
        print(f"mindio-tft: {problem}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    from mindio_tft_patch.launch.drill.options import add_arguments

    parser = argparse.ArgumentParser(
        prog="mindio-tft", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
    patches = commands.add_parser("patches", help="what is changed in the installed Megatron, and whether it fits")
    patches.add_argument("--argv", default="", metavar="FLAGS", help="flags of the training job, in one word")
    patches.add_argument("--log", type=Path, metavar="DIR", help="log folder of a job: shows what it reached")
    keys = commands.add_parser("keys", help="writes new keys of the control channel, for TFT_KEYS")
    keys.add_argument("file", type=Path, metavar="FILE", help="must not exist; only you will be able to read it")
    doctor = commands.add_parser(
        "doctor",
        usage="mindio-tft doctor [--json] [--script] -- <the training command>",
        help="says before a job starts whether it will hold, and what each fault will lead to",
    )
    doctor.add_argument(
        "--script",
        action="store_true",
        help="the command is a shell script: run it, with a ttprun and a torchrun that start nothing, and examine how "
        "it calls them; all else in it is really done",
    )
    for command in (patches, doctor):
        command.add_argument("--json", action="store_true", help="print JSON")
    add_arguments(
        commands.add_parser(
            "drill",
            usage="mindio-tft drill [--faults SCHEDULE | --random N] [options] -- <the training command>",
            help="runs a job, injects faults, and reports what became of each",
        )
    )
    return parser


def _patches(options: argparse.Namespace, environ: os._Environ[str] | dict[str, str]) -> int:
    from mindio_tft_patch.adaptors.megatron import patch_report, patch_view

    config = read_config(shlex.split(options.argv), environ)
    with patch_view.quiet_import(environ):
        report = patch_report.inspect_patches(config)
    if options.log is not None:
        report = patch_report.with_calls(report, options.log)
    patch_view.show(report, as_json=options.json)
    return 0 if report.holds else 1


def _keys(options: argparse.Namespace) -> int:
    from mindio_tft_patch.protocol.keys import new_keys, write_keys

    write_keys(options.file, new_keys())
    print(f"{options.file} holds new keys. Give the file to the controller and to all ranks, in TFT_KEYS.")
    return 0


def _doctor(options: argparse.Namespace, training: list[str], environ: os._Environ[str] | dict[str, str]) -> int:
    from mindio_tft_patch.adaptors.doctor import examine, shell_script, view

    if options.script and shell_script.is_shell_script(training):
        call = shell_script.recorded(training, environ)
        training, environ = list(call.words), dict(call.environ)
        os.chdir(call.folder)  # where the script's relative paths begin
        print(f"mindio-tft: examined is: {shlex.join(training)}", file=sys.stderr)
    report = examine.examine(training, environ)
    view.show(report, as_json=options.json)
    return 1 if report.errors else 0


def _drill(options: argparse.Namespace, training: list[str], environ: os._Environ[str] | dict[str, str]) -> int:
    from mindio_tft_patch.launch.drill.main import drill

    return drill(options, training, environ)


if __name__ == "__main__":
    main()
