"""`make gpu`: every claim about CUDA measured on this machine's GPU, slice by slice.

`python3 bench/on_gpu --help` says how to run it; docs/gpu.md says what came out.
"""
