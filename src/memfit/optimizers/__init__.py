"""Optimizers, one file each: the state they declare and the torch object they build."""
