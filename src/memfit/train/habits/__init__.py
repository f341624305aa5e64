"""What fine-tuners expect around and within the steps of a run: one habit a file."""
