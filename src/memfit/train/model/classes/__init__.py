"""Attention of Hugging Face's classes that pick theirs from a table: one file a family."""
