"""The real one redirects torch.cuda to torch.npu when it is imported; here both are the CPU already."""
