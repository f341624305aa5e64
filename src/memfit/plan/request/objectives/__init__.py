"""What a request's objective decides and excludes: pairs of answers, sampled answers."""
