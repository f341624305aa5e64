"""How long one optimizer step takes, from its operations: arithmetic alone, no torch.

`work` says what is computed and moved, `rates` how fast, `step` lays it end to end. All of it takes
Python numbers and numpy arrays alike, so that a search evaluates many layouts in one call.
"""
