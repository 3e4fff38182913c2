"""Jobs of MindSpeed-LLM's pretrain_gpt.py on CPU: command line, environment, start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from support.jobs import JobSpec, ProcessJob

FOLDER = Path(__file__).parent
VARIABLES = ("MINDSPEED_LLM_PATH", "MINDSPEED_PATH", "MEGATRON_LM_PATH")
ITERATIONS = 20

# The flags of MindSpeed-LLM's tests/pipeline/high_availability, with a model that two CPU cores can train.
_MODEL = """
    --use-mcore-models --transformer-impl local --sequence-parallel --num-layers 2 --hidden-size 64
    --ffn-hidden-size 192 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --micro-batch-size 2 --global-batch-size 16 --make-vocab-size-divisible-by 1 --lr 1e-3
    --lr-decay-style cosine --untie-embeddings-and-output-weights --disable-bias-linear
    --attention-dropout 0.0 --init-method-std 0.01 --hidden-dropout 0.0 --position-embedding-type rope
    --normalization RMSNorm --use-fused-rmsnorm --swiglu --use-flash-attn --no-masked-softmax-fusion
    --attention-softmax-in-fp32 --min-lr 1e-4 --weight-decay 1e-1 --lr-warmup-fraction 0.01 --clip-grad 1.0
    --adam-beta1 0.9 --initial-loss-scale 65536 --adam-beta2 0.95 --no-gradient-accumulation-fusion
    --use-fused-swiglu --use-fused-rotary-pos-emb --use-distributed-optimizer --bf16 --overlap-grad-reduce
    --distributed-timeout-minutes 2
"""
_DATA = "--mock-data --tokenizer-type NullTokenizer --vocab-size 4223 --split 949,50,1 --num-workers 0"
_OUTPUT = "--log-interval 1 --save-interval 1000 --eval-interval 1000 --eval-iters 2"


def missing() -> list[str]:
    """Variables that name no folder."""
    return [name for name in VARIABLES if not Path(os.environ.get(name) or "/nonexistent").is_dir()]


def arguments(*, tp: int, save: Path | None = None, load: Path | None = None, extra: Sequence[str] = ()) -> list[str]:
    """Arguments of pretrain_gpt.py, without the flags of high availability. extra: appended last, so it wins."""
    made = [*_MODEL.split(), *_DATA.split(), *_OUTPUT.split(), "--distributed-backend", "gloo"]
    made += ["--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", "1"]
    made += ["--train-iters", str(ITERATIONS)]
    made += [] if save is None else ["--save", str(save)]
    made += [] if load is None else ["--load", str(load)]
    return [*made, *extra]


def start(spec: JobSpec, mode: str = "plugin") -> ProcessJob:
    """Start a job with the installed ttprun. mode: TFT_MINDSPEED."""
    spec.folder.mkdir(parents=True, exist_ok=True)
    path = [str(FOLDER / "path"), *(os.environ[name] for name in VARIABLES), os.environ.get("PYTHONPATH", "")]
    variables = {
        **spec.variables(),
        "PYTHONPATH": os.pathsep.join(path).strip(os.pathsep),
        "PYTHONWARNINGS": "ignore",
        "TFT_DEVICE": "cpu",
        "TFT_MINDSPEED": mode,
    }
    with (spec.folder / "launcher.txt").open("wb") as output:
        process = subprocess.Popen(
            [Path(sys.executable).with_name("ttprun"), *spec.command_line(FOLDER / "armed_mindspeed.py")],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **variables},
            cwd=spec.folder,
            start_new_session=True,
        )
    return ProcessJob(spec, process)
