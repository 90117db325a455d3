"""What a kernel's rows see and what becomes of its scores, as functions of numpy's arrays: emitted modules
check themselves against it."""

from __future__ import annotations

from ..expression import Constant, Expression, Load, Name, folded
from ..problem import Problem
from ..scoring.scores import BATCH, DIAGONAL, HEAD, KEY, NUM_KEYS, NUM_ROWS, QUERY, ROW, SCORE
from ..tree.functions import FUNCTIONS, Kind

#: How functions are written that Python has not, or not for arrays.
_CALLS = {
    "not": "np.logical_not({0})",
    "min": "np.fmin({0}, {1})",
    "max": "np.fmax({0}, {1})",
    "pow": "np.power({0}, {1})",
    "int": "np.asarray({0}).astype(np.int64)",
    "float": "np.asarray({0}).astype(np.float64)",
}
_INFIXES = {"and": "{0} & {1}", "or": "{0} | {1}", "rsqrt": "1 / np.sqrt({0})"}
#: What the parts of an expression are called in such a function; numbers and arrays are members of ``at``.
_NAMES = {
    **{each.name: each.name for each in (BATCH, HEAD, QUERY, KEY, NUM_ROWS, NUM_KEYS, SCORE)},
    ROW.name: QUERY.name,
    DIAGONAL.name: f"{NUM_KEYS.name} - {NUM_ROWS.name}",
}


def numpy_text(root: Expression) -> str:
    """Returns an expression of arrays ``b, h, q, k, score``, of ``seqlen_q`` and ``seqlen_k``, and of the
    members of ``at``, in Python."""
    return _text(root)[0]


def _text(root: Expression) -> tuple[str, bool]:
    """An expression's text, and whether it stands in others as it is."""

    def written(node: Expression, operands: list[tuple[str, bool]]) -> tuple[str, bool]:
        texts = [text for text, _ in operands]
        match node:
            case Name():
                return _NAMES.get(node.name, f"at.{node.name}"), node.name != DIAGONAL.name
            case Load():
                return f"at.{node.buffer}[{', '.join(texts)}]", True
            case Constant() if node.kind is Kind.FLOAT and abs(node.number) == float("inf"):
                return ("-np.inf" if node.number < 0 else "np.inf"), node.number > 0
            case Constant():
                return node.python(), node.number >= 0
        name = getattr(node, "function")  # noqa: B009
        pattern = FUNCTIONS[name].python.pattern
        if name in _CALLS:
            return _CALLS[name].format(*texts), True
        if name not in _INFIXES and pattern.startswith(f"{name}("):
            return f"np.{pattern.format(*texts)}", True
        is_root = name == "rsqrt"
        grouped = [text if alone or is_root else f"({text})" for text, alone in operands]
        return _INFIXES.get(name, pattern).format(*grouped), False

    return folded(root, written)


def seen_text(problem: Problem) -> list[str]:
    """Returns the conditions that all hold where a row sees a key, in Python; ``causal`` says whether the
    causal mask does."""
    scores = problem.scores
    conditions = []
    for each in (*scores.begins, *scores.ends[1:]):
        is_begin = each in scores.begins
        limit = f"({KEY.name} {'>=' if is_begin else '<'} {numpy_text(each.key)})"
        conditions.append(f"(np.logical_not(causal) | {limit})" if each.flag else limit)
    if scores.predicate is not None:
        text, alone = _text(scores.predicate)
        conditions.append(text if alone else f"({text})")
    return conditions


def changed_text(problem: Problem) -> str:
    """Returns what becomes of a score, in Python."""
    change = problem.scores.change
    return SCORE.name if change is None else numpy_text(change)
