#!/bin/sh
# A GPT of 4 layers on four CPU ranks of this machine, with fault tolerance: no accelerator needed, about half a minute.
#
#   sh launch/examples/gpt_tiny_cpu.sh [FOLDER [MORE ARGUMENTS OF MEGATRON, SUCH AS --train-iters 60]]
#
# Kill one of the ranks (kill -9) while it trains: it is started anew, and every iteration appears once. SIGTERM to ttprun
# writes a checkpoint into FOLDER/ckpt, from which the same command goes on. Needs `pip install '.[megatron]'` in a checkout.
# Will it hold? `mindio-tft doctor --script -- sh launch/examples/gpt_tiny_cpu.sh [FOLDER]` makes the data and starts no rank.
set -eu

folder=${1:-tiny_gpt}
[ $# -eq 0 ] || shift
launch=$(python -c 'import importlib.util; print(importlib.util.find_spec("mindio_tft_patch.launch").submodule_search_locations[0])')

[ -f "$folder/text.idx" ] || python -m mindio_tft_patch.launch.prepare_data --output "$folder/text"

# One thread a rank; four ranks with the default would fight for the cores.
export OMP_NUM_THREADS=1

exec ttprun --standby --nproc-per-node 4 "$launch/pretrain_gpt.py" \
    --enable-high-availability --enable-hbmfault-repair --enable-worker-reboot \
    --distributed-backend gloo --transformer-impl local \
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 \
    --micro-batch-size 2 --global-batch-size 16 --train-iters 200 --bf16 --use-distributed-optimizer \
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --clip-grad 1.0 \
    --data-path "$folder/text" --tokenizer-type NullTokenizer --vocab-size 257 --split 90,8,2 \
    --no-create-attention-mask-in-dataloader --num-workers 0 \
    --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion \
    --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion \
    --save "$folder/ckpt" --load "$folder/ckpt" --save-interval 50 --ckpt-format torch_dist \
    --eval-interval 100 --eval-iters 2 --log-interval 1 "$@"
