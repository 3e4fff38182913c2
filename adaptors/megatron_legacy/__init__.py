"""The Megatron-LM of 2023 (commit 285068c): `megatron.training` is one file, and checkpoints have a form of their own.

What differs from later Megatrons is here; everything else is adaptors.megatron, which asks this Megatron through the
names of `newer_names.py`.
"""
