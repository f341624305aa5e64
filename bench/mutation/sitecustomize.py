"""What processes of tests reach is marked, too: Python imports this where it starts."""

import marking  # noqa: F401
