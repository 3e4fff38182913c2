"""Calls an operation on lists of tensors."""

from mindio_tft_patch.adaptors.device.cpu_legacy_apex import MultiTensorApply

multi_tensor_applier = MultiTensorApply()
