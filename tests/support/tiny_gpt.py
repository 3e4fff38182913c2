"""The Megatron command line of a GPT so small that four ranks train it on two CPU cores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

# The sizes keep every bucket of the distributed optimizer a multiple of 128 elements: core_v0.12.1 pads a bucket that
# the tied embedding splits off wrongly otherwise ("each param only belongs to a single bucket").
_COMMON = """
    --distributed-backend gloo --transformer-impl local --use-mcore-models
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 192
    --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 16
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2 --lr-decay-iters 100 --clip-grad 1.0
    --weight-decay 0.01 --seed 1234 --split 90,8,2 --num-workers 0 --tokenizer-type NullTokenizer
    --log-interval 1 --timing-log-level 0 --eval-iters 2 --make-vocab-size-divisible-by 64
    --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion
    --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
    --no-create-attention-mask-in-dataloader --distributed-timeout-minutes 2
"""


def tiny_gpt_args(
    *,
    data_prefix: str | None,
    tp: int = 1,
    pp: int = 1,
    vpp: int | None = None,
    ep: int = 1,
    num_experts: int | None = None,
    moe_dispatcher: Literal["allgather", "alltoall"] = "allgather",
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16",
    train_iters: int = 10,
    save: str | None = None,
    load: str | None = None,
    ckpt_format: Literal["torch_dist", "torch"] = "torch_dist",
    overlap: bool = False,
    dropout: float = 0.0,
    distributed_optimizer: bool = True,
    eval_interval: int = 1000,
    save_interval: int = 1000,
    extra: Sequence[str] = (),
    megatron: Literal["0.19", "0.12"] = "0.19",
) -> list[str]:
    """Return the arguments of `launch/pretrain_gpt.py`.

    data_prefix: what `prepare_data --output` was given; None takes Megatron's mock data.
    vpp: virtual pipeline stages a rank, of 4 layers in all. extra: appended last, so it wins.
    """
    if num_experts is not None and tp > 1:
        # Megatron wants sequence parallelism then, and its LayerNorm for that is in Transformer Engine or Apex.
        raise ValueError("Experts together with tensor parallelism do not work without Transformer Engine.")
    args = [*_COMMON.split(), "--train-iters", str(train_iters), "--eval-interval", str(eval_interval)]
    args += ["--attention-dropout", str(dropout), "--hidden-dropout", str(dropout)]
    # 257 ids for bytes; mock data counts up to 4096. NullTokenizer of 0.12 adds the end of document itself.
    vocabulary = 257 if data_prefix else 4224
    args += ["--vocab-size", str(vocabulary - 1 if megatron == "0.12" else vocabulary)]
    args += ["--data-path", data_prefix] if data_prefix else ["--mock-data"]
    args += ["--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp)]
    if vpp is not None:
        args += ["--num-layers-per-virtual-pipeline-stage", str(4 // (pp * vpp))]
    if num_experts is not None:
        args += ["--num-experts", str(num_experts), "--expert-model-parallel-size", str(ep)]
        args += ["--moe-token-dispatcher-type", moe_dispatcher, "--moe-router-load-balancing-type", "aux_loss"]
        args += ["--moe-aux-loss-coeff", "1e-2", "--moe-router-topk", "2", "--disable-bias-linear"]
    if dtype != "fp32":
        args += [f"--{dtype}"]
    if dtype == "fp16":
        # Starts too high on purpose: the first steps overflow and are skipped.
        args += ["--initial-loss-scale", str(2**17), "--loss-scale-window", "4", "--hysteresis", "1"]
    if distributed_optimizer:
        args += ["--use-distributed-optimizer"]
    if overlap:
        args += ["--overlap-grad-reduce"] + (["--overlap-param-gather"] if distributed_optimizer else [])
    args += ["--ckpt-format", ckpt_format]
    if save is not None:
        args += ["--save", save, "--save-interval", str(save_interval)]
    if load is not None:
        args += ["--load", load]
    return [*args, *extra]
