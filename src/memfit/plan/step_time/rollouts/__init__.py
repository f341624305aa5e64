"""Seconds of an iteration of reinforcement learning: prefill, decode, score, reference, update.

`decoding` says what one token step reads and launches, `phases` lays an iteration end to end,
`decode_range` how far such predictions were from published rates. Arithmetic alone, no torch.
"""
