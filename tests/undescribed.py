"""Keys that are not described, as `memfit check` names them."""

import re

from memfit.core.errors import InvalidRequest


def assert_named(pattern, read):
    """That what the pattern matches is refused as a mistake, or said to be not described.

    read: reads files as `check` does, and returns what they say.
    """
    try:
        checked = read()
    except InvalidRequest as error:
        named = f"{error.message}\n{error.hint}"
    else:
        checked = checked[0] if isinstance(checked, tuple) else checked
        named = "\n".join(f"`{o.setting}` in `{o.file}`: {o.why}" for o in checked.undescribed)
    assert re.search(pattern, named), named


def list_undescribed(checked):
    """Files and keys that are not described."""
    return [f"{one.file}: {one.key}" for one in checked.undescribed]
