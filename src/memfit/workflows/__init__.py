"""What one verb does from its inputs to its files."""
