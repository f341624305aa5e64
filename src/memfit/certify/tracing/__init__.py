"""The trainer's own step on fake tensors."""
