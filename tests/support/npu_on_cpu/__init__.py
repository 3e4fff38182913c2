"""MindSpeed-LLM on CPU, for tests: a stand-in for torch_npu (`path/`), and jobs of its unmodified pretrain_gpt.py."""
