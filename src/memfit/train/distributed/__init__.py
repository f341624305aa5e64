"""What the ranks of one run share and send."""
