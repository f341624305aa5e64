"""What ranks that share a model gather, keep, send and reduce."""
