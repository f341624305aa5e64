"""Layers with code of their own: quantised, low-precision, routed, fused."""
