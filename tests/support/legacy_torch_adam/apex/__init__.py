"""Apex as a port to another device brings it along: the names, over torch's own optimizers."""
