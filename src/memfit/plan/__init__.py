"""Closed-form prediction and search. Never imports torch."""
