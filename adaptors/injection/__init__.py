"""Faults on purpose in a Megatron job (TFT_INJECT): the moments and the kinds that need Megatron, tensors or sockets.

Nothing here is imported, and nothing is wrapped, in a job without that variable.
"""
