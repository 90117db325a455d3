"""What rules of several families say alike: of pages that the copy engine brings, and of heads in a tile."""

from __future__ import annotations

from ..problem import Problem
from .wgmma.shared_memory import SWIZZLED_ROWS


def why_not_swizzled(problem: Problem, rows: int, way_out: str) -> str | None:
    """Says why the copy engine cannot bring pieces of a page of so many ``rows`` to where products read them,
    and the ``way_out``; None where it can."""
    if rows % SWIZZLED_ROWS == 0:
        return None
    return (
        f"pages of {problem.page_size} keys are no whole groups of {SWIZZLED_ROWS} rows, as the copy engine "
        f"brings them; {way_out}"
    )


def why_not_pack_heads(problem: Problem, most_rows: int) -> str | None:
    """Says why tiles of the rows of all heads that share keys are never the best: there are no such heads, or
    each has more than ``most_rows``; None where they may be."""
    if problem.group == 1:
        return f"pack_heads=True: {problem.num_q_heads} query heads have as many of keys"
    if problem.seqlen_q > most_rows:
        return f"pack_heads=True: {problem.seqlen_q} query rows fill tiles by themselves"
    return None


def why_not_both_ways(splits: int, workspace_splits: int) -> str | None:
    """Says why blocks of a cluster that share keys leave nothing in the workspace; None where none leave
    anything, or form no cluster."""
    if splits > 1 and workspace_splits > 1:
        by_cluster = f"the {splits} blocks of a cluster share keys already"
        return f"workspace_splits={workspace_splits}: {by_cluster}"
    return None
