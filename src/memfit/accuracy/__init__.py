"""How far predictions were from measured runs."""
