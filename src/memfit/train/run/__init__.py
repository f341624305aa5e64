"""The loop around the steps, and what can go wrong around it."""
