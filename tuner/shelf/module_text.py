"""What the constants of an emitted Python module say of its kernels."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Mapping
from typing import Any

from ...gen.families import family_named
from ...gen.kernel import Kernel
from ...gen.launch import Launch, TensorMap
from ...gen.problem import Problem


def read_module(text: str) -> list[tuple[Kernel, str, str]]:
    """Reads kernel, card and name of each kernel in a module's text; a module of one has no name for it.

    Raises:
        KeyError, TypeError, ValueError, SyntaxError, AttributeError: it is no module of this flashgen.
    """
    constants: dict[str, Any] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.AnnAssign):
            target, value = node.target, node.value
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
        else:
            continue
        if isinstance(target, ast.Name) and target.id.isupper() and value is not None:
            with contextlib.suppress(ValueError):
                constants[target.id] = _table(value) if target.id == "KERNELS" else ast.literal_eval(value)
    if "KERNELS" not in constants:
        return [(*_kernel_of(constants), "")]
    return [
        (*_kernel_of({**each, "SOURCE": constants["SOURCES"][each["SOURCE"]]}), each["NAME"])
        for each in constants["KERNELS"]
    ]


def _table(value: ast.expr) -> list[dict[str, Any]]:
    """The arguments of the calls in a tuple, by the names of the constants in a module of one kernel."""
    if not isinstance(value, ast.Tuple):
        raise ValueError("KERNELS is no tuple")
    return [
        {argument.arg.upper(): ast.literal_eval(argument.value) for argument in call.keywords if argument.arg}
        for call in value.elts
        if isinstance(call, ast.Call)
    ]


def _kernel_of(constants: Mapping[str, Any]) -> tuple[Kernel, str]:
    """The kernel that a module's constants describe, and the card it names."""
    parameters = dict(constants["VARIANT"])
    variant = family_named(parameters.pop("family")).from_dict(parameters)
    symbol = constants["SYMBOL"].decode()
    launch = Launch(
        constants["THREADS"],
        constants["SMEM_BYTES"],
        constants.get("ROWS_PER_BLOCK"),
        constants.get("HEADS_PER_BLOCK", 1),
        tuple(TensorMap(*each) for each in constants.get("MAPS", ())),
        constants.get("MAX_BLOCKS"),
        constants.get("CLUSTER", 1),
        constants.get("PACK_HEADS", False),
        constants.get("SPLITS", 1),
        constants.get("HEADS_PER_CLUSTER", 1),
    )
    kernel = Kernel(
        Problem.from_dict(constants["PROBLEM"]),
        variant,
        constants["DEVICE"]["arch"],
        constants["SOURCE"],
        symbol.removesuffix("_kernel"),
        (launch,),
    )
    return kernel, constants["DEVICE"]["name"]
