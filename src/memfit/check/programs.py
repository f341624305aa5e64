"""Python programs that make a trainer, read as text and never run.

Statements are followed in their order with what their names hold: literals, what classes are called
with, defaults of argparse. All else is `Computed`, known only where the program runs.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from memfit.check.python_source import ARITHMETIC, LARGEST, MOST_SOURCE
from memfit.core.errors import InvalidRequest
from memfit.core.system.reading import read_text

MOST_STATEMENTS = 20_000  # followed; of calls within calls, each time anew
DEEPEST = 12  # calls of the program's own functions within each other
LONGEST = 10_000  # characters of a text that is put together
PLAIN = (str, int, float, bool, type(None))
CASTS = {"int": int, "float": float, "str": str, "bool": bool}
DTYPES = ("bfloat16", "float16", "float32", "float64", "half")
# asked of the machine; of a GPU that trains in these days, both hold
TRUE_OF_GPUS = ("is_bf16_supported", "is_bfloat16_supported", "is_available")
SAME_MODEL = ("to", "cuda", "train", "eval", "cpu")  # methods that return the model


class Computed(NamedTuple):
    """A value that is known where the program runs, as it is written."""

    text: str


class Made:
    """What a class, or a function of a library, is called with."""

    def __init__(self, name: str, arguments: Sequence[Any], keywords: dict[str, Any]) -> None:
        self.name, self.arguments, self.keywords = name, arguments, keywords

    def get(self, key: str, place: int = -1) -> Any:
        """The value of an argument by name, or by its place; None where it is not stated."""
        if key in self.keywords:
            return self.keywords[key]
        return self.arguments[place] if 0 <= place < len(self.arguments) else None


class Program:
    """What a program's statements make, followed one after the other."""

    def __init__(self, file: Path, arguments: Mapping[str, Any]) -> None:
        self.file, self.arguments = file, arguments
        self.names: dict[str, Any] = {}
        self.functions: dict[str, ast.FunctionDef] = {}
        self.aliases: dict[str, str] = {}  # `import SFTTrainer as Base`
        self.classes: dict[str, str] = {}  # of the program's own -> the class it extends
        self.options: dict[str, Any] = {}  # argparse's, with their defaults
        self.trainers: list[Made] = []
        self.lengths: list[Any] = []  # tokens to which rows are cut
        self.happened: dict[str, str] = {}  # what is done to the model -> as it is written
        self._called: set[str] = set()
        self._left = MOST_STATEMENTS
        self._doubts: list[str] = []  # conditions around a statement that are not known
        self._open: list[str] = []  # functions that are being called
        self._returned: Any = None

    def follow(self, body: Sequence[ast.stmt]) -> None:
        """Follow a module's statements, then its functions if nobody has called them."""
        self.run(body)
        for name, function in list(self.functions.items()):
            if name in self._called:
                continue
            known, happened = len(self.trainers), dict(self.happened)
            self._call_own(function, [], {})  # by a library, such as what `map` is given
            if known:  # what else it would make, nobody asks for
                del self.trainers[known:]
                self.happened = happened

    def run(self, body: Sequence[ast.stmt]) -> None:
        """Follow statements; raises InvalidRequest where there are too many."""
        for node in body:
            self._left -= 1
            if self._left < 0:
                raise InvalidRequest(f"`{self.file}` is too long to be read")
            self._follow(node)

    def _follow(self, node: ast.stmt) -> None:
        match node:
            case ast.FunctionDef() | ast.ClassDef() | ast.ImportFrom():
                self._define(node)
            case ast.Assign():
                value = self.value(node.value)
                for target in node.targets:
                    self._assign(target, value)
            case ast.AnnAssign() if node.value is not None:
                self._assign(node.target, self.value(node.value))
            case ast.AugAssign() | ast.For():
                self._assign(node.target, Computed(ast.unparse(node.target)))
                self.run(node.body if isinstance(node, ast.For) else ())
            case ast.If():
                self._branch(node)
            case ast.While() | ast.With():
                self.run(node.body)
            case ast.Try():
                self.run([*node.body, *node.orelse, *node.finalbody])
            case ast.Expr():
                self.value(node.value)
            case ast.Return() if node.value is not None:
                self._returned = self.value(node.value)

    def _define(self, node: ast.FunctionDef | ast.ClassDef | ast.ImportFrom) -> None:
        """A name: of a class, what it extends and the values of its own names."""
        if isinstance(node, ast.FunctionDef):
            self.functions[node.name] = node
            return
        if isinstance(node, ast.ImportFrom):
            self.aliases |= {one.asname: one.name for one in node.names if one.asname}
            return
        if node.bases:
            name = _last(node.bases[0])
            self.classes[node.name] = self.aliases.get(name, name)
        with self._scope():
            self.run([one for one in node.body if isinstance(one, ast.Assign | ast.AnnAssign)])
            own = {one: self.names[one] for one in _assigned(node.body) if one in self.names}
        self.names[node.name] = Made(node.name, (), own)

    def _branch(self, node: ast.If) -> None:
        """One branch where its condition is known, else what both agree on."""
        condition = self.value(node.test)
        if ast.unparse(node.test).startswith("__name__"):
            condition = True
        if not isinstance(condition, Computed | Made):
            self.run(node.body if condition else node.orelse)
            return
        before = dict(self.names)
        self._doubts.append(f"by `if {ast.unparse(node.test)}`")
        self.run(node.body)
        one, self.names = self.names, before
        self.run(node.orelse)
        doubt = self._doubts.pop()
        for name, value in one.items():
            if name in self.names and self.names[name] is not value != self.names[name]:
                self.names[name] = Computed(f"{name}, {doubt}")
            else:
                self.names[name] = value

    def _assign(self, target: ast.expr, value: Any) -> None:
        match target:
            case ast.Name():
                self.names[target.id] = value
            case ast.Tuple() | ast.List():
                several = isinstance(value, list) and len(value) == len(target.elts)
                for place, one in enumerate(target.elts):
                    self._assign(one, value[place] if several else Computed(ast.unparse(one)))
            case ast.Attribute():
                if target.attr == "requires_grad":
                    self.happened["requires_grad"] = ast.unparse(target)
                if isinstance(owner := self.value(target.value), Made):
                    doubtful = self._doubts and owner.name.endswith(("Config", "Arguments"))
                    text = f"{ast.unparse(target)}, {self._doubts[-1]}" if doubtful else ""
                    owner.keywords[target.attr] = Computed(text) if text else value
            case ast.Subscript():
                owner, key = self.value(target.value), self.value(target.slice)
                if isinstance(owner, dict) and isinstance(key, str):
                    owner[key] = value

    def value(self, node: ast.expr) -> Any:
        """What an expression holds: a literal, what was made, or `Computed`."""
        match node:
            case ast.Constant() if isinstance(node.value, PLAIN):
                return node.value
            case ast.Name():
                return self.names.get(node.id, Computed(node.id))
            case ast.List() | ast.Tuple() | ast.Set():
                return [self.value(one) for one in node.elts]
            case ast.Dict():
                keys = [key and self.value(key) for key in node.keys]
                values = [self.value(one) for one in node.values]
                return {str(k): v for k, v in zip(keys, values, strict=True) if k is not None}
            case ast.Attribute():
                return self._attribute(node)
            case ast.Subscript():
                owner, key = self.value(node.value), self.value(node.slice)
                if isinstance(owner, dict) and isinstance(key, str):
                    return owner.get(key, Computed(ast.unparse(node)))
            case ast.JoinedStr():
                return self._join(node)
            case ast.Call():
                return self._call(node)
            case ast.UnaryOp() | ast.BinOp() | ast.BoolOp() | ast.IfExp():
                return self._reckon(node)
        return Computed(ast.unparse(node))

    def _attribute(self, node: ast.Attribute) -> Any:
        if ast.unparse(node.value) == "torch" and node.attr in DTYPES:
            return "float16" if node.attr == "half" else node.attr
        owner = self.value(node.value)
        if isinstance(owner, Made) and node.attr in owner.keywords:
            return owner.keywords[node.attr]
        return Computed(ast.unparse(node))

    def _join(self, node: ast.JoinedStr) -> Any:
        parts = [
            self.value(one.value if isinstance(one, ast.FormattedValue) else one)
            for one in node.values
        ]
        known = all(isinstance(part, PLAIN) for part in parts)
        text = "".join(map(str, parts)) if known else ""
        return text if known and len(text) <= LONGEST else Computed(ast.unparse(node))

    def _reckon(self, node: ast.UnaryOp | ast.BinOp | ast.BoolOp | ast.IfExp) -> Any:
        found: Any = Computed(ast.unparse(node))
        if isinstance(node, ast.IfExp):
            condition = self.value(node.test)
            if not isinstance(condition, Computed):
                return self.value(node.body if condition else node.orelse)
        elif isinstance(node, ast.UnaryOp):
            value = self.value(node.operand)
            if isinstance(node.op, ast.Not) and isinstance(value, PLAIN):
                return not value
            if isinstance(node.op, ast.USub) and isinstance(value, int | float):
                return -value
        elif isinstance(node, ast.BoolOp):
            values = [self.value(one) for one in node.values]
            if not any(isinstance(one, Computed) for one in values):
                last = isinstance(node.op, ast.And)  # the first that is false, or is true for `or`
                return next((one for one in values if bool(one) is not last), values[-1])
        elif type(node.op) in ARITHMETIC:
            left, right = self.value(node.left), self.value(node.right)
            known = all(isinstance(n, int | float) and abs(n) < LARGEST for n in (left, right))
            if known and not (isinstance(node.op, ast.FloorDiv) and right == 0):
                return ARITHMETIC[type(node.op)](left, right)
        return found

    def _call(self, node: ast.Call) -> Any:
        called, text = _last(node.func), ast.unparse(node)
        name = self.aliases.get(called, called)
        arguments = [self.value(one) for one in node.args]
        keywords: dict[str, Any] = {}
        for one in node.keywords:
            value = self.value(one.value)
            if one.arg:
                keywords[one.arg] = value
            elif isinstance(value, dict):
                keywords |= value
            else:
                keywords["**"] = Computed(ast.unparse(one.value))
        if isinstance(node.func, ast.Name) and name in self.functions:
            return self._call_own(self.functions[name], arguments, keywords)
        if {"truncation", "max_length"} <= keywords.keys():
            self.lengths.append(keywords["max_length"])
        owner = self.value(node.func.value) if isinstance(node.func, ast.Attribute) else None
        if isinstance(owner, Made) and owner.name == "from_pretrained" and name != owner.name:
            return self._call_model(name, owner, text)
        return self._call_library(name, node, Made(name, arguments, keywords))

    def _call_library(self, name: str, node: ast.Call, made: Made) -> Any:
        """What a call of something else leaves: a value that is known, or what was made."""
        first, text = next(iter(made.arguments), None), ast.unparse(node)
        if name in TRUE_OF_GPUS:
            return True
        if name in CASTS:
            return _cast(name, first, text)
        if name == "getenv" or ast.unparse(node.func) == "os.environ.get":
            return Computed(text) if made.get("default", 1) is None else made.get("default", 1)
        if name == "add_argument":
            self._add_option(made)
        elif name == "parse_args":
            return Made("options", (), {**self.options, **self.arguments})
        elif name in ("get_peft_model", "prepare_model_for_kbit_training"):
            return self._wrap(name, first, made, text)
        elif name == "requires_grad_":
            self.happened["requires_grad"] = text
        elif name == "from_pretrained":
            return made
        elif name[:1].isupper() or name in self.classes:
            return self._make(name, made)
        return Computed(text)

    def _wrap(self, name: str, model: Any, made: Made, text: str) -> Any:
        """peft's functions that take a model and return it."""
        if name == "get_peft_model" and isinstance(model, Made):
            model.keywords["peft_config"] = made.get("peft_config", 1)
        elif name == "prepare_model_for_kbit_training":
            self.happened[name] = text
            if made.get("use_gradient_checkpointing", 1) is not False:
                self.happened["gradient_checkpointing_enable"] = text
        return model

    def _make(self, name: str, made: Made) -> Made:
        known = self.names.get(name)
        if isinstance(known, Made):  # a class of the program's own, with its values
            made.keywords = {**known.keywords, **made.keywords}
        if self.classes.get(name, name).endswith("Trainer"):
            self.trainers.append(made)
        return made

    def _call_model(self, name: str, model: Made, text: str) -> Any:
        """A method of the model's."""
        if name in ("half", "bfloat16", "float") or (name == "to" and "torch." in text):
            self.happened["dtype"] = text
        elif name == "requires_grad_":
            self.happened["requires_grad"] = text
        elif name in ("gradient_checkpointing_enable", "resize_token_embeddings", "add_adapter"):
            self.happened[name] = text
        return model if name in (*SAME_MODEL, "half", "bfloat16", "float") else Computed(text)

    def _add_option(self, made: Made) -> None:
        """One of argparse's, by its long name."""
        names = [str(one).lstrip("-").replace("-", "_") for one in made.arguments]
        name = made.keywords.get("dest", max(names, key=len, default=""))
        default = made.keywords.get("default")
        if default is None:
            switch = {"store_true": False, "store_false": True}.get(made.keywords.get("action", ""))
            default = Computed(f"--{name}") if switch is None else switch
        self.options[str(name)] = default

    def _call_own(
        self, function: ast.FunctionDef, arguments: Sequence[Any], keywords: Mapping[str, Any]
    ) -> Any:
        """What a function of the program's own returns."""
        self._called.add(function.name)
        if function.name in self._open or len(self._open) >= DEEPEST:
            return Computed(f"{function.name}(…)")
        taken = [*function.args.posonlyargs, *function.args.args]
        defaults = function.args.defaults
        own = {one.arg: Computed(one.arg) for one in [*taken, *function.args.kwonlyargs]}
        own |= {one.arg: self.value(node) for one, node in
                zip(taken[len(taken) - len(defaults) :], defaults, strict=True)}  # fmt: skip
        own |= {one.arg: self.value(node) for one, node in
                zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
                if node is not None}  # fmt: skip
        own |= dict(zip((one.arg for one in taken), arguments, strict=False))
        own |= {key: value for key, value in keywords.items() if key in own}
        before, self._returned = self._returned, None
        with self._scope():
            self.names |= own
            self._open.append(function.name)
            self.run(function.body)
            self._open.pop()
        found, self._returned = self._returned, before
        return found

    @contextmanager
    def _scope(self) -> Iterator[None]:
        before = dict(self.names)
        yield
        self.names = before


def read_program(file: Path, arguments: Mapping[str, Any] | None = None) -> Program:
    """What a Python file or a notebook makes; raises InvalidRequest where it cannot be read.

    arguments: with which it is started, in the place of argparse's defaults.
    """
    program = Program(file, arguments or {})
    text = read_text(file, most=MOST_SOURCE)
    try:
        body = (
            _read_cells(text, file) if file.suffix == ".ipynb" else ast.parse(text, file.name).body
        )
        program.follow(body)
    except (SyntaxError, ValueError, MemoryError) as error:
        raise InvalidRequest(f"cannot read `{file}`: {error}") from None
    except RecursionError:
        raise InvalidRequest(f"`{file}` nests too deeply to be read") from None
    return program


def _read_cells(text: str, file: Path) -> list[ast.stmt]:
    """The statements of a notebook's cells of code, without what IPython alone reads."""
    found: list[ast.stmt] = []
    data = json.loads(text)
    cells = data.get("cells", []) if isinstance(data, dict) else []
    for number, cell in enumerate(cells if isinstance(cells, list) else [], 1):
        if not isinstance(cell, dict) or cell.get("cell_type") != "code":
            continue
        source = cell.get("source", "")
        lines = "".join(source) if isinstance(source, list) else str(source)
        if lines.lstrip().startswith("%%"):
            continue
        code = [line for line in lines.splitlines() if line.lstrip()[:1] not in ("!", "%")]
        try:
            found += ast.parse("\n".join(code)).body
        except SyntaxError as error:
            raise InvalidRequest(f"cannot read cell {number} of `{file}`: {error}") from None
    return found


def _cast(name: str, value: Any, text: str) -> Any:
    """`int("8")`; of what is not known, or is none, as it is written."""
    try:
        return CASTS[name](value) if isinstance(value, PLAIN) else Computed(text)
    except (TypeError, ValueError, OverflowError):
        return Computed(text)


def _last(node: ast.expr) -> str:
    """The last name of `a.b.c`."""
    return ast.unparse(node).rpartition(".")[2]


def _assigned(body: Sequence[ast.stmt]) -> Iterator[str]:
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        yield from (one.id for one in targets if isinstance(one, ast.Name))
