"""Megatron's arguments where Megatron itself cannot be asked, or stopped in the middle of its validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# What the checks look at; the default is Megatron's.
_NUMBERS = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "num_experts": None,
    "num_distributed_optimizer_instances": 1,
    "save_interval": None,
    "train_iters": None,
    "num_layers": None,
    "hidden_size": None,
    "ffn_hidden_size": None,
    "num_attention_heads": None,
    "num_query_groups": None,
    "vocab_size": None,
    "moe_ffn_hidden_size": None,
}
_TEXTS = {
    "save": None,
    "load": None,
    "ckpt_format": "torch_dist",
    "optimizer": "adam",
    "distributed_backend": "nccl",
    "dataloader_type": None,
}
_SWITCHES = (
    "use_distributed_optimizer",
    "use_tp_pp_dp_mapping",
    "mock_data",
    "bf16",
    "fp16",
    "swiglu",
    "group_query_attention",
    "no_save_optim",
    "optimizer_cpu_offload",
    "use_megatron_fsdp",
    "use_custom_fsdp",
    "use_torch_fsdp2",
    "overlap_param_gather_with_optimizer_step",
    "inprocess_restart",
    "enable_ft_package",
)
_LISTS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")


def read_words(words: Sequence[str]) -> dict[str, Any]:
    """Read a few flags by attribute name; a value that is no number is left at its default."""
    found: dict[str, Any] = {**_NUMBERS, **_TEXTS, **dict.fromkeys(_SWITCHES, False), **dict.fromkeys(_LISTS)}
    for position, word in enumerate(words):
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or name not in found:
            continue
        values = [value] if equals else _values(words[position + 1 :])
        if name in _SWITCHES:
            found[name] = True
        elif name in _LISTS:
            found[name] = values
        elif values and name in _TEXTS:
            found[name] = values[0]
        elif values and values[0].isdecimal():
            found[name] = int(values[0])
    return found


def _values(words: Sequence[str]) -> list[str]:
    end = next((place for place, word in enumerate(words) if word.startswith("--")), len(words))
    return list(words[:end])


def completed(arguments: Mapping[str, Any], words: Sequence[str], world_size: int) -> dict[str, Any]:
    """Megatron's arguments with what its validation would have worked out, where it did not come so far."""
    whole = {**read_words(words), **arguments}
    whole["world_size"] = world_size
    if not whole.get("data_parallel_size"):
        names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        used = 1
        for name in names:
            whole[name] = int(whole.get(name) or 1)
            used *= whole[name]
        whole["data_parallel_size"] = world_size // used
    return whole
