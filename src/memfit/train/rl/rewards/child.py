"""The process in which a reward function runs: `python -m memfit.train.rl.rewards.child`.

Arguments: the function, bytes of memory, a descriptor to read requests from, one to write answers
to. A request and an answer are a JSON object a line. What the function prints goes to stderr.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

from memfit.core.system.processes import end_with_parent
from memfit.train.rl.rewards.functions import BUILT_IN, Judge


def find_function(spec: str) -> Judge:
    """`number`, `regex:PATTERN`, …, or `FILE.py:NAME`; LookupError or what the file raises."""
    first, _, rest = spec.partition(":")
    if first in BUILT_IN:
        return BUILT_IN[first](rest)
    path, _, name = spec.rpartition(":")
    file = Path(path).resolve()
    sys.path.insert(0, str(file.parent))
    found = importlib.util.spec_from_file_location(file.stem, file)
    if found is None or found.loader is None:
        raise LookupError(f"`{path}` is no Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[file.stem] = module
    found.loader.exec_module(module)
    if not callable(function := getattr(module, name, None)):
        raise LookupError(f"`{path}` has no function `{name}`")
    return function  # type: ignore[no-any-return]


def main() -> None:
    """Load the function, say so, and answer until there is no request."""
    end_with_parent()
    spec, memory, read, write = sys.argv[1], *map(int, sys.argv[2:])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    requests, answers = os.fdopen(read), os.fdopen(write, "w")

    def say(**content: Any) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    try:
        judge = find_function(spec)
    except BaseException as error:
        say(unusable=describe(error))
        return
    say(ready=True)
    for line in requests:
        try:
            say(rewards=_plain(_await(judge(**json.loads(line)))))
        except MemoryError:
            say(failed="memory", because="MemoryError")
        except BaseException as error:  # `sys.exit` ends this request alone
            say(failed="raised", because=describe(error))


def _await(rewards: Any) -> Any:
    """What an asynchronous function, which TRL takes, too, returns in the end."""
    if not inspect.iscoroutine(rewards):
        return rewards
    import asyncio

    return asyncio.run(rewards)


def describe(error: BaseException) -> str:
    """An exception's kind and what it says, in one line of bounded length."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _plain(rewards: Any) -> list[Any]:
    """Numbers as JSON has them; a tensor's or array's element gives its number."""
    return [
        r if r is None or isinstance(r, int | float | str) else getattr(r, "item", lambda: str)()
        for r in rewards
    ]


if __name__ == "__main__":
    main()
