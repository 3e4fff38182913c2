"""The command line of the tiny trainer."""

from __future__ import annotations

import argparse
from pathlib import Path


def read_options() -> argparse.Namespace:
    """Read sys.argv; flags of the fault tolerance are left to whoever knows them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--save", type=Path, required=True, help="folder of the checkpoints; loaded from it, too")
    parser.add_argument("--save-interval", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--sequence", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=64)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=2, help="of one rank in one step")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    return parser.parse_known_args()[0]
