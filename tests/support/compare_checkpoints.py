"""The product's own reader and comparison of checkpoints, under the name that tests use."""

from mindio_tft_patch.adaptors.megatron.checkpoint_compare import PERSONAL_ARGUMENTS, differences, read, same_bits

__all__ = ["PERSONAL_ARGUMENTS", "differences", "read", "same_bits"]
