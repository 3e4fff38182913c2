"""How large a checkpoint will be, by a rough count of the parameters. An estimate: within a fifth for plain GPTs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MOMENTS, _MAIN = 8, 4  # bytes of a parameter: exp_avg and exp_avg_sq, and the main parameter, in fp32


def parameters(arguments: Mapping[str, Any]) -> int | None:
    """Parameters of the whole model; None where the arguments do not tell.

    Attention 2 h^2 + 2 h^2 g/a (h hidden size, a heads, g query groups), MLP 2 h f, or 3 h f when gated (f its hidden
    size), once for each expert, and the embeddings. Norms and biases are left out; latent attention is not modelled.
    """
    layers, hidden = arguments.get("num_layers"), arguments.get("hidden_size")
    if not layers or not hidden:
        return None
    heads = arguments.get("num_attention_heads") or 1
    groups = (arguments.get("num_query_groups") or heads) if arguments.get("group_query_attention") else heads
    channels = (arguments.get("kv_channels") or hidden // heads) * heads
    attention = 2 * hidden * channels + 2 * hidden * channels * groups // heads
    gated = 3 if arguments.get("swiglu") else 2
    dense = gated * hidden * (arguments.get("ffn_hidden_size") or 4 * hidden)
    experts = arguments.get("num_experts") or 0
    moe = gated * hidden * (arguments.get("moe_ffn_hidden_size") or arguments.get("ffn_hidden_size") or 4 * hidden)
    moe = experts * (moe + hidden) + gated * hidden * (arguments.get("moe_shared_expert_intermediate_size") or 0)
    sparse = _expert_layers(arguments.get("moe_layer_freq"), layers) if experts else 0
    vocabulary = arguments.get("padded_vocab_size") or arguments.get("vocab_size") or 0
    embeddings = vocabulary * hidden * (2 if arguments.get("untie_embeddings_and_output_weights") else 1)
    if arguments.get("position_embedding_type") == "learned_absolute":
        embeddings += (arguments.get("max_position_embeddings") or 0) * hidden
    return int(layers * attention + (layers - sparse) * dense + sparse * moe + embeddings)


def _expert_layers(frequency: Any, layers: int) -> int:
    """--moe-layer-freq: an expert layer every n layers, or a list of 0 and 1."""
    if isinstance(frequency, list):
        return sum(bool(one) for one in frequency)
    return int(layers // max(1, int(frequency or 1)))


def checkpoint_bytes(arguments: Mapping[str, Any]) -> int | None:
    """Bytes of a checkpoint: parameters in their own type, and without --no-save-optim what the optimizer keeps."""
    count = parameters(arguments)
    if count is None:
        return None
    own = int(arguments.get("params_bytes") or (2 if arguments.get("bf16") or arguments.get("fp16") else 4))
    if arguments.get("no_save_optim"):
        return count * own
    moments = _MOMENTS if arguments.get("optimizer", "adam") != "sgd" else 4
    return count * (own + moments + (_MAIN if own < 4 else 0))


def in_words(size: float) -> str:
    """1.5 GiB and the like."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if size >= 10 or unit == "B" else f"{size:.1f} {unit}"
