"""`torch_npu.profiler` exists; nothing is profiled in these tests."""
