"""Decoders of linear attention and attention in turn."""
