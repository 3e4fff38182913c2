"""A torch_npu without an NPU, for tests of software that cannot be imported without one (MindSpeed).

The CPU stands in for the device, as `mindio_tft_patch.adaptors.device.cpu` lets it stand in for CUDA: `torch.npu` is
`torch.cuda` by another name, and the operators in `operators.py` compute what the NPU's compute with torch's own. It is
found when its folder is on PYTHONPATH; no wheel contains it.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from torch_npu import absent, compiled, contrib, distributed, npu, profiler, utils
from torch_npu.operators import npu_fusion_attention, npu_rms_norm, npu_rotary_mul, npu_swiglu

__version__ = "2.14.0"
__all__ = [
    "contrib",
    "distributed",
    "npu",
    "npu_fusion_attention",
    "npu_rms_norm",
    "npu_rotary_mul",
    "npu_swiglu",
    "profiler",
    "utils",
]

# The compiled part: MindSpeed asks whether HCCL's groups can be given names for its profiler. They cannot.
_C = SimpleNamespace(_distributed_c10d=SimpleNamespace(ProcessGroupHCCL=SimpleNamespace(Options=object)))

absent.install()
compiled.install()
# The device type "npu" itself is not registered with torch, which would then ask for a driver. The CPU stand-in takes
# the name wherever a device may be named.
torch.npu = npu  # type: ignore[attr-defined]
torch.Tensor.npu = lambda self, *_args, **_kwargs: self  # type: ignore[attr-defined]
torch.nn.Module.npu = lambda self, *_args, **_kwargs: self  # type: ignore[attr-defined,assignment]
