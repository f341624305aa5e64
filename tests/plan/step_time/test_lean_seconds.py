"""Predicted seconds of lean blocks beside plain ones."""
