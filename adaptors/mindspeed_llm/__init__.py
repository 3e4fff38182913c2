"""MindSpeed-LLM 2.3.0: whose code protects training, and where ours has to reach.

MindSpeed-LLM is Megatron-LM core_v0.12 with many of its functions replaced, by a patcher that runs when
`mindspeed_llm.megatron_adaptor` is imported; and it has a high-availability feature of its own, a client of the SDK.

| file | purpose |
|---|---|
| detection.py | is this process one of MindSpeed-LLM's, or of plain Megatron with MindSpeed-LLM beside it |
| feature.py | keeps MindSpeed-LLM's own feature from acting, and its code from seeing the flags |
| patches.py | the table of patches of adaptors/megatron, aimed at what really runs |
| refused.py | options of MindSpeed that cannot work together with ours |
| install.py | the switch TFT_MINDSPEED, and the order of things |

Training loop, optimizer and checkpoints are still Megatron's: all that happens after the installation is in
adaptors/megatron.
"""
