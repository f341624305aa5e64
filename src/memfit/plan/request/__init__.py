"""From a request to the knobs that a search decides."""
