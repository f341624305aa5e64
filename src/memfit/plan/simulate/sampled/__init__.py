"""What an iteration of reinforcement learning runs, without data."""
