"""What the table of an emitted Python module says of its kernels."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...gen.emit.cuda import read_cuda
from ...gen.families import family_named
from ...gen.handover.reach import reach_launches
from ...gen.handover.split_rows import split_launches
from ...gen.handover.split_tiles import split_tile_launches
from ...gen.kernel import Kernel
from ...gen.launch import APPEND_ROLE, MAIN_ROLE, WALKED_TILES_ROLE, Launch, TensorMap
from ...gen.problem import Problem
from ...gen.scoring.buffer_gradients import buffer_gradients
from ..files import read_text

#: The tables, of kernels forwards and backwards: a module has either or both.
_TABLES = ("KERNELS", "GRADIENTS")
#: The sources of those modules that have one or several in them.
_SOURCE, _SOURCES = "SOURCE", "SOURCES"


def read_module(path: Path, text: str) -> list[tuple[Kernel, str, str]]:
    """Reads kernel, card and name of each kernel in a module's text; a module of one has no name for it.

    A module without a source of its own has it in the .cu file beside ``path``.

    Raises:
        OSError: that file cannot be read.
        KeyError, TypeError, ValueError, SyntaxError, AttributeError: it is no module of this flashgen.
    """
    assigned: dict[str, ast.expr] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            assigned[node.target.id] = node.value
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            assigned[node.targets[0].id] = node.value
    tables = [name for name in _TABLES if name in assigned]
    if not tables:
        raise KeyError(" or ".join(_TABLES))
    facts = [_arguments(call) for name in tables for call in _entries(name, assigned[name])]
    if _SOURCES in assigned:
        sources = ast.literal_eval(assigned[_SOURCES])
        return [(*_kernel_of(each, sources[_key(each["source"])]), _value(each["name"])) for each in facts]
    source = assigned[_SOURCE]
    if isinstance(source, ast.Constant):
        return [(*_kernel_of(facts[0], str(source.value)), "")]
    kernel, _ = read_cuda(read_text(path.with_suffix(".cu")))
    return [(*_kernel_of(facts[0], kernel.source), "")]


def _entries(name: str, table: ast.expr) -> list[ast.expr]:
    """The calls that make the entries of the table of that name."""
    if not isinstance(table, ast.Tuple):
        raise ValueError(f"{name} is no tuple")
    return table.elts


def _arguments(call: ast.expr) -> dict[str, Any]:
    """The expressions that a call's keywords have."""
    return {keyword.arg: keyword.value for keyword in _call(call).keywords if keyword.arg is not None}


def _key(expression: ast.expr) -> str:
    """The key of ``SOURCES[key]``."""
    if not isinstance(expression, ast.Subscript):
        raise ValueError(f"line {expression.lineno} takes nothing from {_SOURCES}")
    return _value(expression.slice)


def _value(expression: ast.expr) -> Any:
    return ast.literal_eval(expression)


def _kernel_of(facts: Mapping[str, ast.expr], source: str) -> tuple[Kernel, str]:
    """The kernel that an entry of the table describes, and the card it names."""
    parameters, device = _value(facts["variant"]), _value(facts["device"])
    variant = family_named(parameters.pop("family")).from_dict(parameters)
    problem = Problem.from_dict(_value(facts["problem"]))
    entry = f"attention_{problem.stem}"
    launches = facts["launches"]
    if not isinstance(launches, ast.Tuple):
        raise ValueError("a kernel's launches are no tuple")
    made = tuple(_launch_of(_arguments(each), entry, problem) for each in launches.elts)
    main = next(each for each in made if each.role == MAIN_ROLE)
    workspace = variant.workspace_of(problem, main)
    return Kernel(problem, variant, device["arch"], source, entry, made, workspace), device["name"]


def _launch_of(facts: Mapping[str, ast.expr], entry: str, problem: Problem) -> Launch:
    """The launch that an entry's call describes."""
    maps = facts.get("maps", ast.Tuple([]))
    if not isinstance(maps, ast.Tuple):
        raise ValueError("a launch's maps are no tuple")
    # `count` follows from the numbers, as `arguments` do from the operation, what is said of lists from the
    # variant and `plans`, like whether tiles are of keys, from the role.
    others = (
        "symbol",
        "arguments",
        "count",
        "maps",
        "lists",
        "list_words",
        "list_batch_strides",
        "list_head_strides",
        "plans",
    )
    numbers: dict[str, Any] = {name: _value(facts[name]) for name in facts if name not in others}
    numbers.setdefault("rows_per_block", None)
    role = _value(facts["symbol"]).removeprefix(f"{entry}_")
    if role in (alike := _launches_of_all(problem)):
        return replace(alike[role], dependent=numbers.get("dependent", False))
    return Launch(
        **numbers,
        packed=problem.layout.is_packed,
        role=role,
        of_keys=role == WALKED_TILES_ROLE or (problem.backward and role == MAIN_ROLE),
        rotates=role == APPEND_ROLE and problem.append is not None and bool(problem.append.rotary),
        tensor_maps=tuple(TensorMap(*map(_value, _call(each).args)) for each in maps.elts),
    )


def _launches_of_all(problem: Problem) -> dict[str, Launch]:
    """The launches, by role, that are the same of all kernels of a problem."""
    found = list(reach_launches())
    if problem.backward:
        of_buffers = (each.launch for each in buffer_gradients(problem.scores))
        found += (*split_launches(), *split_tile_launches(), *of_buffers)
    return {each.role: each for each in found}


def _call(expression: ast.expr) -> ast.Call:
    if not isinstance(expression, ast.Call):
        raise ValueError(f"line {expression.lineno} calls nothing")
    return expression
