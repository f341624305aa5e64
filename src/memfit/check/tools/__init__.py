"""One file for each tool whose configuration is read."""
