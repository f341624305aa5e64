"""What the steps of transformers' Trainer and of TRL have in common."""
