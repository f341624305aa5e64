"""What every module may use: errors, units, registry, number formats and wording."""
