"""The page of `memfit ui`: a server on this machine alone that answers with the verbs' own JSON.

It calculates nothing. A question is a query string of keys and values as `--set` takes them, and
its answer is what the command line prints with `--json`.
"""
