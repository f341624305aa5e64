"""TOML tables of named rows, each parsed when it is first looked up.

Parsing a whole catalogue takes 15 ms, a row 0.1 ms; `memfit plan` needs two rows.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from memfit.core.errors import InvalidRequest, UnknownName

_HEADER = re.compile(r'^\["?([^"\]\n]+)"?\]$', re.MULTILINE)


NOTHING: Mapping[str, str] = {}


class Rows:
    """One TOML file of `[id]` tables; a table named in `shared` is not a row."""

    def __init__(self, path: Path, what: str, words: tuple[str, ...], shared: str = "") -> None:
        self._path = path
        self._what = what
        self._words = words  # keys whose values also name the row
        self._shared = shared

    @cached_property
    def _texts(self) -> dict[str, str]:
        pieces = _HEADER.split(self._path.read_text(encoding="utf-8"))
        names, texts = pieces[1::2], pieces[2::2]
        if len(set(names)) < len(names):
            raise ValueError(f"{self._path} holds a row twice")
        return dict(zip(names, texts, strict=True))

    @property
    def ids(self) -> list[str]:
        """Every row's id, in the file's order."""
        return [name for name in self._texts if name != self._shared]

    def mentioning(self, word: str) -> list[str]:
        """Ids of the rows whose text has this word, the only ones that can hold it as a value."""
        return [key for key in self.ids if word in self._texts[key]]

    def shared(self) -> Mapping[str, Any]:
        """The table that rows refer to, which nobody changes."""
        return self._shared_table

    @cached_property
    def _shared_table(self) -> dict[str, Any]:
        return tomllib.loads(self._texts[self._shared])

    def row(self, key: str) -> dict[str, Any]:
        """One row as it stands in the file."""
        return tomllib.loads(self._texts[key])

    def find(self, name: str, also: Mapping[str, str] = NOTHING) -> str:
        """The id that a name means: an id, another name of the row, or a part of one id only.

        also: names of another file's rows, as `slug` writes them -> their ids.
        Raises UnknownName (did-you-mean), or InvalidRequest when several rows are like that.
        """
        word = slug(name)
        if found := self.find_own(name, also):
            return found
        alike = self._like(word, (*self.ids, *also))
        begins = list(dict.fromkeys(also.get(key, key) for key in alike))  # ids, each once
        if len(begins) == 1:
            return begins[0]
        if begins:
            shown = ", ".join(f"`{key}`" for key in begins)
            raise InvalidRequest(
                f"`{name}` names several {self._what}s", hint=f"say which: {shown}"
            )
        known = [*self.ids, *also, *(word for word in self._by_word if "(" not in word)]
        raise UnknownName(self._what, name, known, see=f"`memfit {self._what}s` lists them")

    def find_own(self, name: str, also: Mapping[str, str] = NOTHING) -> str:
        """The id of the row that has this whole name; "" where no row has."""
        word = slug(name)
        return word if word in self.ids else also.get(word) or self._by_word.get(word, "")

    def names(self) -> dict[str, str]:
        """Every row's names as `slug` writes them, without the account of a hub id -> its id."""
        known = {word.rpartition("/")[2]: key for word, key in self._by_word.items()}
        return known | {key: key for key in self.ids}

    @staticmethod
    def _like(word: str, keys: tuple[str, ...]) -> list[str]:
        """Ids that begin or end with a word, or are it but for hyphens; the first that match."""
        whole = [key for key in keys if key.replace("-", "") == word.replace("-", "")]
        begins = [key for key in keys if word and key.startswith(f"{word}-")]
        return whole or begins or [key for key in keys if word and key.endswith(f"-{word}")]

    @cached_property
    def _by_word(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for key in self.ids:
            for word in _values(self.row(key), self._words):
                if found.setdefault(slug(word), key) != key:
                    raise ValueError(f"`{word}` names both {found[slug(word)]} and {key}")
        return found


def _values(row: dict[str, Any], keys: tuple[str, ...]) -> Iterator[str]:
    for key in keys:
        value = row.get(key, ())
        yield from (value,) if isinstance(value, str) else value


def slug(name: str) -> str:
    """How names are compared: case, spaces and underscores do not matter."""
    return re.sub(r"[\s_]+", "-", name.strip().lower())
