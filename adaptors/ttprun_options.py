"""Options of `ttprun`: torchrun's, read by torchrun's own parser, and --standby."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import torch.distributed.run as torchrun

from mindio_tft_patch.adaptors.unknown_words import STANDBY


def parse_ttprun(words: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Parse a command line of ttprun.

    Returns:
        torchrun's options, with `standby` (0: none) in addition; and the words without --standby, for torchrun.

    Raises:
        SystemExit: torchrun does not like the options; it has said why.
    """
    parser = torchrun.get_args_parser()
    parser.add_argument(
        STANDBY,
        nargs="?",
        const=1,
        default=0,
        type=int,
        metavar="N",
        help="Keep N processes ready on this node (default when given: 1), which have imported everything and take "
        "the place of a lost rank. Used by jobs with --enable-worker-reboot.",
    )
    found = next((place for place, word in enumerate(words) if word.partition("=")[0] == STANDBY), None)
    if found is None:
        return parser.parse_args(words), list(words)
    length, count = _value(words, found)
    rest = [*words[:found], *words[found + length :]]
    options = parser.parse_args(rest)
    if found > len(rest) - len(options.training_script_args) - 1:
        # Behind the script's name: an option of the script.
        return parser.parse_args(words), list(words)
    if count is None:
        parser.error(f"argument {STANDBY}: {words[found].partition('=')[2]!r} is not a number of processes")
    options.standby = count
    return options, rest


def _value(words: Sequence[str], place: int) -> tuple[int, int | None]:
    """How many words the option takes, and its number; None: it is none."""
    _, equals, text = words[place].partition("=")
    if equals:
        return 1, int(text) if text.isdecimal() else None
    following = words[place + 1] if place + 1 < len(words) else ""
    return (2, int(following)) if following.isdecimal() else (1, 1)
