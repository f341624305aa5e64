"""Questions about a plan: comparisons, limits, reasons, ways out."""
