"""A GPT of megatron-core in its DistributedDataParallel: bf16 parameters, gradients summed in fp32."""

from __future__ import annotations

from argparse import Namespace

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig


def build_model(options: Namespace) -> DistributedDataParallel:
    """This rank's part of the model. All ranks of a data-parallel group make the same parameters."""
    config = TransformerConfig(
        num_layers=options.layers,
        hidden_size=options.hidden,
        num_attention_heads=4,
        ffn_hidden_size=2 * options.hidden,
        tensor_model_parallel_size=options.tensor_parallel,
        hidden_dropout=options.dropout,
        attention_dropout=options.dropout,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
    )
    gpt = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=options.vocabulary,
        max_sequence_length=options.sequence,
        share_embeddings_and_output_weights=True,
    )
    return DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), Float16Module(config, gpt.cuda())
    )
