"""LambdaLabsML/distributed-training-guide: a script of its own, chapter by chapter."""

from published import NotExpressible, Published, Translated


def translate(row: Published) -> Translated:
    raise NotExpressible(f"`{row['config'].get('framework')}` by a guide's own script")
