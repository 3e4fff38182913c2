"""Optimizers of torch, which count steps for each parameter, under the names of Apex."""

from torch import optim

FusedAdam, FusedSGD = optim.AdamW, optim.SGD
