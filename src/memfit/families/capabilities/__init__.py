"""Which techniques a family's class can run with, and why others cannot."""
