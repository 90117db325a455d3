"""Walks over trees whose parts are shared, however deep they are: each node once, after its operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

#: Up to how many nodes recursion is quicker than keeping what is done.
SMALL = 64


class Node(Protocol):
    """What has operands of its own kind, and knows how many nodes it has when written out."""

    @property
    def operands(self) -> tuple[Any, ...]: ...

    @property
    def size(self) -> int: ...


NodeT = TypeVar("NodeT", bound=Node)


def folded(root: NodeT, visit: Callable[[NodeT, list[Any]], Any]) -> Any:
    """Returns what ``visit`` makes of the root, having made of each node something from what it made of the
    node's operands, however deep they lie; once of each where they are many, however often they are used."""
    if root.size <= SMALL:
        return _recursed(root, visit)
    done: dict[int, Any] = {}
    waiting: list[NodeT] = [root]
    while waiting:
        node = waiting[-1]
        missing = [each for each in node.operands if id(each) not in done] if id(node) not in done else []
        if missing:
            waiting.extend(reversed(missing))
            continue
        waiting.pop()
        if id(node) not in done:
            done[id(node)] = visit(node, [done[id(each)] for each in node.operands])
    return done[id(root)]


def distinct(*roots: NodeT) -> list[NodeT]:
    """Returns the different nodes of trees, each after its operands."""
    seen: dict[NodeT, None] = {}
    for root in roots:
        folded(root, lambda node, _: seen.setdefault(node))
    return list(seen)


def _recursed(node: NodeT, visit: Callable[[NodeT, list[Any]], Any]) -> Any:
    return visit(node, [_recursed(each, visit) for each in node.operands])
