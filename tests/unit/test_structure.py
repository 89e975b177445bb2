"""The package's own shape: small files and functions, one meaning for a name, no import cycles."""

import ast
import functools
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import grimp
import pytest

from mlx_parallm.server.api import route_table
from tests import file_tree, wording

PACKAGE = Path(__file__).parents[2] / "mlx_parallm"
MAX_FILE = 400  # lines
MAX_FUNCTION = 50
MAX_IN_FOLDER = 20
MAX_SHARED_NAMES = 12  # of files: those that every dialect has, as bodies.py
MAX_ARGUMENTS = 7
MAX_FRAGMENTS = 30
MAX_PACKED = 30  # assignments of a tuple to a tuple
BY_KIND = ("api", "formats")  # folders with a file per kind


@functools.cache
def modules() -> Sequence[tuple[str, ast.Module, int]]:
    texts = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    return [(name, ast.parse(text), len(text.splitlines())) for name, text in texts.items()]


def test_files_are_short() -> None:
    assert [(name, lines) for name, _, lines in modules() if lines > MAX_FILE] == []


@pytest.mark.long
def test_functions_are_short() -> None:
    long = [
        (name, node.name, node.end_lineno - node.lineno + 1)
        for name, tree, _ in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= MAX_FUNCTION
    ]
    assert long == []


@pytest.mark.long
def test_a_class_name_means_one_class() -> None:
    places = defaultdict(list)
    for name, tree, _ in modules():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


@pytest.mark.long
def test_every_module_says_what_it_owns() -> None:
    assert [name for name, tree, _ in modules() if not ast.get_docstring(tree)] == []


def test_folders_are_small() -> None:
    counts = Counter(path.parent.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
    large = {str(folder): count for folder, count in counts.items() if count > MAX_IN_FOLDER}
    assert {name: count for name, count in large.items() if not name.endswith(BY_KIND) and name != "."} == {}


def test_a_file_s_name_is_used_once() -> None:
    counts = Counter(path.name for path in PACKAGE.rglob("*.py") if path.name not in ("__init__.py", "__main__.py"))
    assert sum(count > 1 for count in counts.values()) <= MAX_SHARED_NAMES


def test_constructors_written_by_hand_are_short() -> None:
    """Those of dataclasses are not written by hand; more belong together in an object."""
    long = {
        node.name
        for _, tree, _ in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
        if len(method.args.args) + len(method.args.kwonlyargs) - 1 > MAX_ARGUMENTS
    }
    assert long == set()


def test_no_ternary_is_in_another() -> None:
    nested = [
        (name, node.lineno)
        for name, tree, _ in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.IfExp) and isinstance(node.orelse, ast.IfExp)
    ]
    assert nested == []


def test_assignments_are_written_out() -> None:
    """Values are swapped in one line; what has nothing to do with each other stands in a line each."""
    packed = [
        (name, node.lineno)
        for name, tree, _ in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
    ]
    assert len(packed) <= MAX_PACKED


def test_docstrings_are_sentences() -> None:
    assert len(list(wording.fragments())) < MAX_FRAGMENTS


def test_what_a_device_is_is_asked_in_one_place() -> None:
    asking = [name for name, tree, _ in modules() if "is_available" in ast.dump(tree) and "metal" in ast.dump(tree)]
    assert asking == ["devices/device.py"]


def test_caches_and_prefixes_are_known_by_their_protocols() -> None:
    found = [
        (name, ast.unparse(node))
        for name, tree, _ in modules()
        if name.startswith(("engine/", "cluster/", "runtime/"))
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance"
        if ast.unparse(node.args[1]).endswith(("Cache", "Prefix"))
    ]
    assert found == []


def test_the_list_of_files_is_that_of_the_docstrings() -> None:
    file_tree.check()


def test_paths_of_routes_stand_in_their_dialects_alone() -> None:
    paths = {route.path for route in route_table().routes} - {"/"}
    found = [
        (name, node.value)
        for name, tree, _ in modules()
        if name.startswith(("server/", "cluster/")) and not name.startswith("server/api/")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("/")
        if any(path.startswith(node.value) for path in paths) and node.value != "/"
    ]
    assert found == []


def test_responses_are_built_by_their_types() -> None:
    """What OpenAPI describes is what writers return: no response is a dictionary written by hand."""
    by_hand = [
        f"{name}:{node.lineno}"
        for name, tree, _ in modules()
        if name.startswith("server/api/")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith(("JSONResponse", "event"))
        and any(isinstance(argument, ast.Dict | ast.BinOp) for argument in node.args)
    ]
    assert by_hand == []


def test_there_is_no_import_cycle() -> None:
    """Imports inside functions and for type checkers counted; but not the package's own lazy names."""
    graph = grimp.build_graph("mlx_parallm", cache_dir=None)
    imports = {
        name: set(graph.find_modules_directly_imported_by(name)) for name in graph.modules if name != "mlx_parallm"
    }
    assert cycles(imports) == []


def cycles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Modules that reach each other."""
    reached = {name: reach(name, imports) for name in imports}
    groups = {
        frozenset(other for other in reached[name] if name in reached.get(other, ()))
        for name in imports
        if name in reached[name]
    }
    return sorted(sorted(group) for group in groups)


def reach(start: str, imports: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    new = set(imports[start])
    while new:
        found |= new
        new = {other for name in new for other in imports.get(name, ())} - found
    return found
