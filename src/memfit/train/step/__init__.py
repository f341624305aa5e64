"""One optimizer step and what it is built from."""
