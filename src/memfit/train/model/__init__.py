"""The model's modules as memfit runs them."""
