"""Where in a module's source a small fault can be planted, and what it would be. `sample` plants them.

A fault is known by its module, its function and its text before and after, so that results and the list of equivalent
faults in docs/MUTATION.md hold while other code changes. What nobody can notice is left alone: annotations, docstrings,
log messages, prose, the texts of errors, assertions.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

PACKAGE = "mlx_parallm"
PROSE = 2  # spaces in a text from which on it is for people
SHOWN = 80  # characters of a text in a fault's name
OPERATORS: dict[type[ast.AST], tuple[str, str]] = {  # how each is written, and what takes its place
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.BitXor: ("^", "&"),
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
Functions = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Fault:
    path: str  # below the package
    function: str  # with its classes before it; empty: the module itself
    line: int
    start: int  # bytes from `start` to `end` are replaced
    end: int
    new: str
    change: str  # for people, and to know it by: what it was and what it is

    @property
    def name(self) -> str:
        module = self.path.removesuffix(".py").replace("/", ".")
        return f"{module}:{self.function}: {self.change}"

    @property
    def reached_as(self) -> str:
        """The name of its function in the map of what tests reach."""
        return f"{self.path}:{self.function}"

    def planted(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]


def faults_of(root: Path) -> list[Fault]:
    """All that can be planted in the package; no two have one name."""
    package = root / PACKAGE
    found = [fault for path in sorted(package.rglob("*.py")) for fault in _Finder(path, package).faults()]
    seen: Counter[str] = Counter()
    named = []
    for fault in found:
        seen[fault.name] += 1
        count = seen[fault.name]
        named.append(fault if count == 1 else replace(fault, change=f"{fault.change} ({count})"))
    return named


def sample(faults: list[Fault], count: int, seed: int) -> list[Fault]:
    """So many of them at random. More of one seed begin with these, and a change elsewhere leaves them as they are."""
    return sorted(faults, key=lambda one: blake2b(f"{seed} {one.name}".encode(), digest_size=8).digest())[:count]


class _Finder:
    def __init__(self, path: Path, package: Path) -> None:
        self._source = path.read_bytes()
        self._path = str(path.relative_to(package))
        self._lines = [0]  # the first byte of each
        for line in self._source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def faults(self) -> Iterator[Fault]:
        yield from self._within(ast.parse(self._source), "")

    def _within(self, node: ast.AST, function: str) -> Iterator[Fault]:
        """Those of a node and of all below it."""
        if isinstance(node, Functions | ast.ClassDef):
            function = f"{function}.{node.name}" if function else node.name
        if _is_left_alone(node):
            return
        for start, end, new, shown in self._changes(node):
            change = f"{self._shown(shown)} -> {self._shown(shown, start, end, new)}"
            assert isinstance(node, ast.expr | ast.stmt)
            yield Fault(self._path, function, node.lineno, start, end, new, change)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params", "bases"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self._within(child, function)

    def _changes(self, node: ast.AST) -> Iterator[tuple[int, int, str, ast.AST]]:
        """Bytes to replace, by what, and the node that shows it best."""
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                yield from self._operator(node, operator, left, right)
            case ast.BinOp(left=left, op=operator, right=right):
                yield from self._operator(node, operator, left, right)
            case ast.BoolOp(op=operator, values=[left, right, *_]):
                yield from self._operator(node, operator, left, right)
            case ast.UnaryOp(op=ast.Not()):
                start = self._at(node)[0]
                yield start, start + len("not "), "", node
            case ast.Call(func=ast.Name(id=name)) if name in NAMES:
                yield *self._at(node.func), NAMES[name], node
            case ast.Constant(value=bool(value)):
                yield *self._at(node), str(not value), node
            case ast.Constant(value=int(value)) | ast.Constant(value=float(value)):
                yield *self._at(node), repr(value + 1), node
            case ast.Constant(value=str(text)) if text and text.count(" ") < PROSE:
                yield *self._at(node), repr(f"{text}XX"), node
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                yield *self._at(test), f"not ({self._text(*self._at(test))})", test
            case ast.Break() | ast.Continue():
                yield *self._at(node), "continue" if isinstance(node, ast.Break) else "break", node
            case ast.Return(value=ast.expr() as value) if not _is_nothing(value):
                yield *self._at(value), "None", node
            case ast.Expr(value=ast.Call()) | ast.Expr(value=ast.Await()) | ast.AugAssign() | ast.Delete():
                yield *self._at(node), "pass", node
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield *self._at(node), "pass", node

    def _operator(
        self, node: ast.AST, operator: ast.AST, left: ast.expr, right: ast.expr
    ) -> Iterator[tuple[int, int, str, ast.AST]]:
        if type(operator) not in OPERATORS:
            return
        symbol, other = OPERATORS[type(operator)]
        first, last = self._at(left)[1], self._at(right)[0]
        pattern = re.escape(symbol).replace(r"\ ", r"\s+")
        pattern = rf"\b{pattern}\b" if symbol.isidentifier() or " " in symbol else pattern
        found = list(re.finditer(pattern.encode(), self._source[first:last]))
        if len(found) == 1:  # none in a comment beside it
            yield first + found[0].start(), first + found[0].end(), other, node

    def _at(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._lines[node.lineno - 1] + node.col_offset, self._lines[node.end_lineno - 1] + node.end_col_offset

    def _text(self, start: int, end: int) -> str:
        return self._source[start:end].decode()

    def _shown(self, node: ast.AST, start: int = 0, end: int = 0, new: str | None = None) -> str:
        """A node's text in a line, perhaps with a part of it replaced; what is too long ends with its digest."""
        assert isinstance(node, ast.expr | ast.stmt)
        first, last = self._at(node)
        text = self._text(first, last)
        if new is not None:
            text = self._text(first, max(first, start)) + new + self._text(min(last, end), last)
        line = " ".join(text.replace("`", "'").split())
        if len(line) <= SHOWN:
            return line
        return f"{line[: SHOWN - 8]}…{blake2b(line.encode(), digest_size=3).hexdigest()}"


def _is_left_alone(node: ast.AST) -> bool:
    match node:
        case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return True
        case ast.Expr(value=ast.Constant()):  # a docstring
            return True
        case ast.Subscript(value=ast.Name(id="Literal")):  # a type
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="log")))):
            return True
        case ast.Assign(value=ast.BinOp(op=ast.BitOr())) | ast.If(test=ast.Name(id="TYPE_CHECKING")):  # types
            return True
    return False


def _is_nothing(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None
