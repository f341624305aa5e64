"""What is counted of memfit's own step: torch's operations, and bytes that eager ones move."""
