"""From a simulated step to a ledger and a verdict."""
