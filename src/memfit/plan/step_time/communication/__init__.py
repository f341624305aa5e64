"""Seconds and bytes of what ranks send each other."""
