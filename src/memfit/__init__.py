"""memfit: plan, certify, train and report the memory of an LLM training step."""

__version__ = "0.1.0"
