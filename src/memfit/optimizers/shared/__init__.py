"""What several optimizers are built from."""
