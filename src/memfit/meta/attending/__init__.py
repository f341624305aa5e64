"""Attention, kernel by kernel."""
