"""The library's shape: imports point down, there are no circles, and nothing is long. ARCHITECTURE.md draws the map."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "specdec_lite"
LONGEST_FILE = 300  # lines
LONGEST_FUNCTION = 50  # lines, the docstring included

# The floor of a file, or of a folder with all in it. A file may import from its own floor and from those below.
# "" is the package's own __init__.py.
FLOORS = {
    1: "distributions randomness verify tree theory roofline gallery tree_gallery lossy timing",
    2: "models checkpoints table gpt2 packed static forms hf pairs",
    3: "drafters training",
    4: "record text decoding adaptive batch alpha",
    5: "engines costs bench results report writeup methods comparison selfcheck examine lawtest plots widgets demo"
    " doctor checks",
    6: "arguments cli",
}
FLOOR = {"": 6} | {room: floor for floor, rooms in FLOORS.items() for room in rooms.split()}
FILES = sorted(PACKAGE.rglob("*.py"))


def module_name(path):
    """``drafters.model`` for specdec_lite/drafters/model.py, ``drafters`` for its __init__.py, "" for the package."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def imported_names(node, module, is_package):
    """The library's modules that one statement may name: ``from a import b`` names a.b, or a."""
    if isinstance(node, ast.Import):
        names = [(alias.name, "") for alias in node.names]
    elif node.level:
        package = module.split(".") if module else []
        here = package[: len(package) + is_package - node.level]
        base = ".".join(["specdec_lite", *here, *([node.module] if node.module else [])])
        names = [(base, alias.name) for alias in node.names]
    else:
        names = [(node.module, alias.name) for alias in node.names]
    for base, name in names:
        if base == "specdec_lite" or base.startswith("specdec_lite."):
            inner = base.removeprefix("specdec_lite").removeprefix(".")
            longer = f"{inner}.{name}".removeprefix(".")
            yield longer if longer in MODULES else inner


def imports(module, source, is_package):
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    return {name for node in nodes for name in imported_names(node, module, is_package)} - {module}


def imports_of(module):
    path = MODULES[module]
    return imports(module, path.read_text(encoding="utf-8"), path.name == "__init__.py")


def room(module):
    return module.split(".")[0]


def climbs(module, imported):
    return FLOOR[room(imported)] > FLOOR[room(module)]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module or "specdec_lite")
def test_imports_point_down_only(module):
    assert room(module) in FLOOR, f"give {MODULES[module].name} a floor, here and in ARCHITECTURE.md"
    upward = sorted(name for name in imports_of(module) if climbs(module, name))
    assert not upward, f"{module} is on floor {FLOOR[room(module)]} and imports {upward} from above"


def test_no_circle_of_imports():
    graph = {module: imports_of(module) for module in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"these import each other: {' <- '.join(error.args[1])}") from error


def test_nothing_needs_the_checks_of_the_exercises():
    users = [module for module in MODULES if any(room(name) == "checks" for name in imports_of(module))]
    assert {room(module) for module in users} <= {"checks"}


@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ("from ..decoding import decode", "decoding"),
        ("from .. import decoding", "decoding"),
        ("from specdec_lite import decoding", "decoding"),
        ("import specdec_lite.decoding", "decoding"),
        ("from . import Draft", "drafters"),
        ("from .. import speculative", ""),
        ("def f():\n    from ..decoding import decode", "decoding"),
    ],
)
def test_every_way_to_write_an_import_is_seen(statement, found):
    assert imports("drafters.model", statement, is_package=False) == {found}
    assert climbs("drafters.model", found) == (found != "drafters")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_no_file_and_no_function_is_long(path):
    source = path.read_text(encoding="utf-8")
    lines = len(source.splitlines())
    assert lines <= LONGEST_FILE, f"{path.name} has {lines} lines; {LONGEST_FILE} is the most"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= LONGEST_FUNCTION, f"{node.name} has {lines} lines; {LONGEST_FUNCTION} is the most"
