"""Pretrain a small GPT with Megatron: the example script of the documentation and of the tests.

The fault tolerance is the first import; everything below it is an ordinary Megatron training script, the same for
core_v0.12 and for the 0.17 and later releases. Start it with `ttprun` in place of `torchrun`.
"""

# isort: off
import mindio_tft_patch  # noqa: F401  (first: it must act before Megatron is imported)

# isort: on
import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import get_blend_and_blend_per_split


def model_provider(pre_process: bool = True, post_process: bool = True, **newer: Any) -> GPTModel:
    """Build this pipeline stage's part of the model.

    newer: what later releases pass in addition (`vp_stage`, `config`, `pg_collection`).
    """
    args = get_args()
    config = newer.pop("config", None) or core_transformer_config_from_args(args)
    vp_stage = {key: value for key, value in newer.items() if key == "vp_stage"}
    if args.num_experts:
        layers = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=args.normalization, **vp_stage
        )
    else:
        layers = get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization)
    return GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        **newer,
    )


def loss_func(loss_mask: torch.Tensor, output_tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the summed loss, the number of tokens in it, and what Megatron logs.

    loss_mask: [micro_batch, sequence] float32. output_tensor: [micro_batch, sequence], loss of each token.
    """
    loss = torch.sum(output_tensor.view(-1).float() * loss_mask.view(-1).float())
    tokens = loss_mask.sum().detach()
    report = torch.stack((loss.detach(), tokens))
    if REPORTS_ARE_REDUCED:
        return loss, tokens.int(), {"lm loss": report}
    # Before 0.13 Megatron logs what it is given, so the sum over the data-parallel group is up to us.
    torch.distributed.all_reduce(report, group=mpu.get_data_parallel_group())
    return loss, tokens.int(), {"lm loss": (report[0], report[1])}


def forward_step(data_iterator: Iterator[dict[str, torch.Tensor]] | None, model: torch.nn.Module) -> tuple[Any, Any]:
    """Run one micro-batch; stages between first and last have no data, only activations."""
    batch: dict[str, torch.Tensor] = {}
    if data_iterator is not None:
        batch = {name: value.cuda(non_blocking=True) for name, value in next(data_iterator).items()}
    loss_mask = batch.get("loss_mask")
    output = model(
        batch.get("tokens"),
        batch.get("position_ids"),
        batch.get("attention_mask"),
        labels=batch.get("labels"),
        loss_mask=loss_mask,
    )
    return output, partial(loss_func, loss_mask)


def train_valid_test_datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Build the three datasets; `vp_stage` makes no difference to the data."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    dataset = MockGPTDataset if args.mock_data else GPTDataset
    datasets: tuple[Any, Any, Any] = BlendedMegatronDatasetBuilder(dataset, num_samples, reads_data, config).build()
    return datasets


def reads_data() -> bool:
    """Return whether this rank reads data: every tensor-parallel rank does, which saves a broadcast a step."""
    return bool(mpu.is_pipeline_first_stage(ignore_virtual=True) or mpu.is_pipeline_last_stage(ignore_virtual=True))


# Every rank asks the provider for datasets (see reads_data), not only tensor-parallel rank 0.
train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]

# Later releases want parsed arguments in a container, and reduce the reported losses themselves.
REPORTS_ARE_REDUCED = "cfg_container" in inspect.signature(pretrain).parameters


def main() -> None:
    """Train with whichever `pretrain` this Megatron has."""
    if not REPORTS_ARE_REDUCED:
        pretrain(train_valid_test_datasets_provider, model_provider, ModelType.encoder_or_decoder, forward_step)
        return
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    # The container's model config would be preferred over our provider; it is there for Megatron's own questions.
    pretrain(config, train_valid_test_datasets_provider, ModelType.encoder_or_decoder, forward_step, model_provider)


if __name__ == "__main__":
    main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
