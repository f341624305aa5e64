"""What several adapters are built from."""
