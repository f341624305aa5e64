"""Model families, one file each, named by Hugging Face's model_type."""
