"""What several objectives share."""
