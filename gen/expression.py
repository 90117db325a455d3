"""Small expressions over named values: written once, printed as C++ or Python, computed by numpy.

Python's operators build them: ``minimum(KEYS, ROW + DIAGONAL + 1)``; `apply` builds those that have no
operator: ``apply("tanh", SCORE)``. What a row sees of the keys, what happens to a score and how many blocks a
launch has are such expressions, so that the kernel, its host launcher, emitted modules, the cost model and
the reference cannot disagree.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import count

from .tree.folding import distinct as distinct
from .tree.folding import folded as folded
from .tree.functions import ATOM
from .tree.functions import Kind as Kind
from .tree.nodes import COMPOSED as COMPOSED
from .tree.nodes import LONGEST_TEXT as LONGEST_TEXT
from .tree.nodes import Apply as Apply
from .tree.nodes import Constant as Constant
from .tree.nodes import Expression as Expression
from .tree.nodes import Load as Load
from .tree.nodes import Name as Name
from .tree.nodes import apply as apply
from .tree.nodes import divided_up as divided_up
from .tree.nodes import expression_of as expression_of
from .tree.nodes import maximum as maximum
from .tree.nodes import minimum as minimum
from .tree.printing import Printed


def loads_of(*roots: Expression) -> tuple[Load, ...]:
    """Returns the different elements of buffers that expressions take."""
    return tuple(node for node in distinct(*roots) if isinstance(node, Load))


def names_of(*roots: Expression) -> tuple[Name, ...]:
    """Returns the different names in expressions, in the order in which they stand there."""
    return tuple(node for node in distinct(*roots) if isinstance(node, Name))


def replaced(root: Expression, others: Mapping[Expression, Expression]) -> Expression:
    """Returns an expression with others in the place of some of its nodes."""

    def rebuilt(node: Expression, operands: list[Expression]) -> Expression:
        return others[node] if node in others else node.with_operands(operands)

    return folded(root, rebuilt)


def with_buffers(root: Expression, names: Mapping[str, str]) -> Expression:
    """Returns an expression that takes elements of other buffers, those of ``names`` by what they are now
    called."""

    def rebuilt(node: Expression, operands: list[Expression]) -> Expression:
        if isinstance(node, Load):
            return Load(names.get(node.buffer, node.buffer), operands, node.kind)
        return node.with_operands(operands)

    return folded(root, rebuilt)


def conjuncts(root: Expression) -> Iterator[Expression]:
    """Yields the conditions that all hold where a truth holds, from left to right."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Apply) and node.function == "and":
            waiting.extend(reversed(node.operands))
        else:
            yield node


def statements(
    root: Expression,
    names: Mapping[str, str] | None = None,
    indent: str = "",
    width: int = 90,
    temporary: str = "t",
) -> tuple[list[str], str]:
    """Returns an expression in C++ as lines that define temporaries, and the text of the result.

    Parts that are used more than once, or would be longer than ``width`` characters, are computed once, as
    ``const float t0 = ...;``, by the name ``temporary`` and a number. What they are made of must exist even
    where a condition does not choose it.
    """
    names = names or {}
    uses: dict[Expression, int] = {}
    nodes = distinct(root)
    for node in nodes:
        for each in node.operands:
            uses[each] = uses.get(each, 0) + 1
    words = set(re.findall(r"\w+", " ".join([*names.values(), *(name.name for name in names_of(root))])))
    fresh = (word for number in count() if (word := f"{temporary}{number}") not in words)
    texts: dict[Expression, Printed] = {}
    lines = []
    for node in nodes:
        text, level = node._text([texts[each] for each in node.operands], names, python=False)
        if node != root and node.operands and (uses[node] > 1 or len(text) > width):
            name = next(fresh)
            lines.append(f"{indent}const {node.kind.c_type} {name} = {text};")
            text, level = name, ATOM
        texts[node] = (text, level)
    return lines, texts[root][0]
