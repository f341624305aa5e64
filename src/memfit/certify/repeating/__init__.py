"""A deep model's tape from a trace that runs some of its blocks: exact, or traced in full."""
