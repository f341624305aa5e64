"""Names and dtypes of weights in the files of a model."""
