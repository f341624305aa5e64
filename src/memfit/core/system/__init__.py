"""The border to the operating system: files that others wrote, output, and processes."""
