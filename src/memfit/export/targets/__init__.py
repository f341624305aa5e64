"""One file for each tool that plans are written for."""
