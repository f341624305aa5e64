"""What the steps of several frameworks are built from."""
