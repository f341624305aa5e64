"""torchtitan's configurations in Python, read as text and never run."""

from __future__ import annotations

import ast
import contextlib
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from memfit.core.errors import InvalidRequest
from memfit.core.system.reading import read_text

Found = dict[str, Any]
ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}  # fmt: skip
MOST_SOURCE = 2**20  # bytes of a file
LARGEST = 10**18  # of a number that is reckoned with
CLASSES = (
    "activation_checkpoint",
    "loss",
    "loss.loss_fn",
    "optimizer",
)  # keys whose class is what they say


def read_python(file: Path, config: str = "") -> Found:
    """What a configuration assigns, as dotted keys; calls by what is called.

    config: the function that makes it; "" where the file makes one alone. Raises InvalidRequest
    where the text is no Python, or makes several or none of that name.
    """
    try:
        tree = ast.parse(read_text(file, most=MOST_SOURCE), file.name)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidRequest(f"cannot read `{file}`: {error}") from None
    if not tree.body:
        raise InvalidRequest(
            f"`{file}` is empty", hint="name a program that makes a trainer, or a configuration"
        )
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    made = [name for name, node in functions.items() if not _asks(node)]
    if config and config not in made:
        raise InvalidRequest(
            f"`{file}` makes no configuration `{config}`",
            hint=f"it makes: {', '.join(made) or 'one, without a name'}",
        )
    if not config and len(made) > 1:
        raise InvalidRequest(
            f"`{file}` makes {len(made)} configurations",
            hint=f"name one: `--config {made[0]}`; it makes: {', '.join(made)}",
        )
    name = config or next(iter(made), "")
    reader = _Configuration(functions, file)
    try:
        reader.run(functions[name].body if name else tree.body)
        if not name:  # a module's own lines, within whatever they stand in
            reader.run([node for node in ast.walk(tree) if isinstance(node, ast.Assign)])
    except RecursionError:  # expressions within expressions, or functions that call each other
        raise InvalidRequest(f"`{file}` nests too deeply to be read") from None
    return reader.found


def _asks(function: ast.FunctionDef) -> bool:
    """Whether a function cannot be called without arguments: a helper."""
    arguments = function.args
    return len(arguments.args) > len(arguments.defaults)


class _Configuration:
    """The keys that the lines of a function set, one after the other."""

    def __init__(self, functions: Mapping[str, ast.FunctionDef], file: Path) -> None:
        self.functions, self.file = functions, file
        self.found: Found = {}
        self.names: dict[str, ast.expr] = {}  # of local variables
        self.returned: set[str] = set()  # what functions return by name; none of a bare module

    def run(self, body: Sequence[ast.stmt]) -> None:
        self.returned |= {
            ast.unparse(n.value) for n in body if isinstance(n, ast.Return) and n.value
        }
        for node in body:
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                self._assign(node.targets[0], node.value)
            elif isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
                self._call("", node.value)
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                self.found[ast.unparse(node.value)] = True  # listed as not looked at
            elif isinstance(node, ast.If | ast.For | ast.While | ast.AugAssign):
                statement = ast.unparse(node).splitlines()[0]
                raise InvalidRequest(
                    f"`{statement}` in `{self.file}`: what it leads to is known where it runs"
                )

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        key = ast.unparse(target).partition(".")[2]
        if key or (isinstance(value, ast.Call) and self._makes(target, value)):
            self._put(key, value)
        elif isinstance(target, ast.Name):
            self.names[target.id] = value

    def _makes(self, target: ast.expr, call: ast.Call) -> bool:
        """Whether a call makes the configuration, and not a part of one."""
        called = not self.returned or ast.unparse(target) in self.returned
        return called or ast.unparse(call.func) in self.functions

    def _put(self, key: str, value: ast.expr) -> None:
        if isinstance(value, ast.Name) and value.id in self.names:
            value = self.names[value.id]
        if isinstance(value, ast.Call):
            self._call(key, value)
        elif key:
            self.found[key] = _value(value, key)

    def _call(self, key: str, call: ast.Call) -> None:
        """`c = llama3_8b()` names the model, `FullAC.Config()` its class, others arguments."""
        name = ast.unparse(call.func)
        if not key and name in self.functions:
            self.run(self.functions[name].body)
        elif not key and not call.args and not call.keywords:
            self.found["model"] = name
        elif not key and not name.endswith("Config"):
            raise InvalidRequest(
                f"`{name}(…)` in `{self.file}` makes a configuration of another one",
                hint="what it changes is known where it runs",
            )
        elif name == "model_registry":
            self._model(call)
        elif name == "float":
            self.found[key] = 0.0  # float("inf"): no clipping
        else:
            if key in CLASSES:
                self.found[key] = name.removesuffix(".Config")
            for argument in call.keywords:
                if key != "loss.loss_fn":
                    self._put(".".join(filter(None, (key, argument.arg))), argument.value)

    def _model(self, call: ast.Call) -> None:
        """`model_registry("8B")`; its other arguments are the model's, and listed."""
        if call.args:
            self.found["model.flavor"] = _value(call.args[0], "")
        for argument in call.keywords:
            self.found[f"model_spec.{argument.arg}"] = _value(argument.value, "")


def _value(node: ast.expr, key: str) -> Any:
    value = _literal(node)
    return "none" if value is None and key == "activation_checkpoint" else value


def _literal(node: ast.expr) -> Any:
    """A literal, or numbers multiplied and added; other expressions as they are written."""
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        left, right = _literal(node.left), _literal(node.right)
        if all(isinstance(n, int | float) and abs(n) < LARGEST for n in (left, right)):
            with contextlib.suppress(ZeroDivisionError, OverflowError):
                return ARITHMETIC[type(node.op)](left, right)
    try:
        found = ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):  # `{[1]: 2}`, too
        return ast.unparse(node)
    return found if _is_plain(found) else ast.unparse(node)


def _is_plain(value: Any) -> bool:
    """Whether it is what YAML or JSON could hold; bytes, sets and complex numbers are not."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_plain(v) for k, v in value.items())
    if isinstance(value, int):
        return abs(value) < LARGEST
    return value is None or isinstance(value, float | str)
