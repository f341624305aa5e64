"""Generation by the modules that train: rows in slots of fixed size, refilled as rows end."""
