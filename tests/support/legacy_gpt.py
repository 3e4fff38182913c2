"""The command line of a small GPT for pretrain_gpt.py of the Megatron-LM of 2023."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

_COMMON = """
    --distributed-backend gloo --num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 192
    --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 16
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2 --lr-decay-iters 100 --clip-grad 1.0
    --weight-decay 0.01 --seed 1234 --split 90,8,2 --num-workers 0 --data-impl mmap
    --log-interval 1 --eval-iters 2 --make-vocab-size-divisible-by 64
    --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion
    --no-bias-gelu-fusion --no-bias-dropout-fusion --no-async-tensor-model-parallel-allreduce
"""


def legacy_gpt_args(
    data: Path,
    *,
    tp: int = 1,
    pp: int = 1,
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16",
    train_iters: int = 10,
    save: Path | None = None,
    distributed_optimizer: bool = True,
    dropout: float = 0.1,
    eval_interval: int = 1000,
    save_interval: int = 1000,
    extra: Sequence[str] = (),
) -> list[str]:
    """Return the arguments. data: folder with text.bin, text.idx, vocab.json and merges.txt. extra: appended last."""
    args = [*_COMMON.split(), "--train-iters", str(train_iters), "--eval-interval", str(eval_interval)]
    args += ["--data-path", str(data / "text"), "--vocab-file", str(data / "vocab.json")]
    args += ["--merge-file", str(data / "merges.txt")]
    args += ["--attention-dropout", str(dropout), "--hidden-dropout", str(dropout)]
    args += ["--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp)]
    if dtype != "fp32":
        args.append(f"--{dtype}")
    if dtype == "fp16":
        # Starts too high on purpose: the first steps overflow and are skipped.
        args += ["--initial-loss-scale", str(2**17), "--loss-scale-window", "4", "--hysteresis", "1"]
    if distributed_optimizer:
        args.append("--use-distributed-optimizer")
    if save is not None:
        args += ["--save", str(save), "--load", str(save), "--save-interval", str(save_interval)]
    return [*args, *extra]
