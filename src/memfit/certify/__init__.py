"""The trainer's own step on fake tensors, replayed through the CUDA allocator."""
