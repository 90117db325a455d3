"""The house's plan: which room imports which, read from the sources.

``templates <- gen <- tuner``, inside gen and tuner from the ground floor up, and nowhere in a circle. An
import counts wherever it stands: under TYPE_CHECKING and inside a function it binds two modules as well.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
#: A room of gen, or module that is none's, imports only from those before it: expressions, then what is asked
#: of a kernel, then what serves it, then the kernel itself.
GEN_ROOMS = (
    *("columns", "tree", "expression", "formula"),
    *("limits", "layout", "lengths", "operation", "launch", "append", "scoring", "problem", "promise"),
    *("serves", "shared_memory", "scored_tiles", "handover", "work", "variant", "watched"),
    *("families", "space"),
    *("arguments", "kernel", "render", "identity", "emit"),
)
#: The same of tuner. The emulated card needs the compiler and the cost model, so that these stand before it.
#: Emitted files are read on the shelf, and proved after that.
TUNER_ROOMS = (
    *("errors", "version", "variables", "extras", "interrupts", "printable", "processes", "files"),
    *("workload", "serving_suites", "training_suites", "suites"),
    *("asked_scoring", "request", "option_words", "serving"),
    *("predict", "build", "cards", "evaluate", "store", "search", "shelf", "exchange", "prove", "accuracy"),
    *("tune", "front", "compat", "bench", "report", "view", "commands", "cli", "start", "package"),
)
PACKAGES = ("templates", "gen", "tuner")


@cache
def imports() -> dict[str, frozenset[str]]:
    """Of each module of the packages by its dotted name, those modules of them that it imports."""
    modules = {_name(path): path for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    return {name: frozenset(_imported(name, path, modules)) for name, path in modules.items()}


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(name: str, path: Path, modules: dict[str, Path]) -> set[str]:
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name.removeprefix("flashgen.") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module or "").removeprefix("flashgen.").split(".")]).strip(".")
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                found.add(inner if inner in modules else module)
    return (found & modules.keys()) - {name}


def _room(name: str) -> str:
    return name.split(".")[1]


IN_ROOMS = pytest.mark.parametrize(("package", "rooms"), [("gen", GEN_ROOMS), ("tuner", TUNER_ROOMS)])


@IN_ROOMS
def test_every_room_has_its_place(package: str, rooms: tuple[str, ...]):
    found = {_room(name) for name in imports() if name.startswith(f"{package}.")}
    assert found == set(rooms), "a room without a place among them, or a place without its room"


@IN_ROOMS
def test_rooms_import_downwards_only(package: str, rooms: tuple[str, ...]):
    floor = {room: i for i, room in enumerate(rooms)}
    wrong = [
        f"{name} imports {other}, which is of a later room"
        for name, others in imports().items()
        for other in sorted(others)
        if name.startswith(f"{package}.")
        and other.startswith(f"{package}.")
        and floor[_room(other)] > floor[_room(name)]
    ]
    assert not wrong, "\n".join(wrong)


def test_packages_import_downwards_only():
    floor = {package: i for i, package in enumerate(PACKAGES)}
    wrong = [
        f"{name} imports {other}"
        for name, others in imports().items()
        for other in sorted(others)
        if floor[other.split(".")[0]] > floor[name.split(".")[0]]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_circle():
    circles = [" and ".join(sorted(circle)) for circle in _circles(imports())]
    assert not circles, "these import each other: " + "; ".join(circles)


def test_a_circle_is_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}
    assert [set(circle) for circle in _circles(graph)] == [{"b", "c"}]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from ..store import studies", {"tuner.store.studies"}),
        ("def f():\n    from ..store.studies import outcomes", {"tuner.store.studies"}),
        ("if TYPE_CHECKING:\n    import flashgen.gen.work", {"gen.work"}),
        ("from ...gen import problem, nothing_of_that_name", {"gen.problem", "gen"}),
    ],
)
def test_imports_are_found_wherever_they_stand(tmp_path, text, found):
    path = tmp_path / "some.py"
    path.write_text(text)
    modules = dict.fromkeys(["tuner.store.studies", "gen.work", "gen.problem", "gen"], path)
    assert _imported("tuner.search.some", path, modules) == found


def _circles(graph: dict[str, frozenset[str]] | dict[str, set[str]]) -> list[list[str]]:
    """The modules that import each other, by Tarjan's algorithm: strongly connected parts of the graph."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        numbers[name] = lowest[name] = len(numbers)
        stack.append(name)
        for other in graph[name]:
            if other not in numbers:
                visit(other)
            if other in stack:
                lowest[name] = min(lowest[name], lowest[other])
        if lowest[name] == numbers[name]:
            part = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(part) > 1:
                found.append(part)

    for name in graph:
        if name not in numbers:
            visit(name)
    return found
