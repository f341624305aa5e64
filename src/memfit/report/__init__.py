"""Predicted, certified and measured, joined and drawn."""
