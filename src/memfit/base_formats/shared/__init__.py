"""What several formats are built from."""
