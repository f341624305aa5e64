"""What one step holds: a small model run over tensors without data."""
