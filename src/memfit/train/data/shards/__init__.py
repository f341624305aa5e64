"""From files to tokens, a shard of a few MiB at a time."""
