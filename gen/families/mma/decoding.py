"""Which problems decode: few query rows for many keys, where device memory bounds a kernel."""

from __future__ import annotations

from ...problem import Problem
from ...scoring.values import keys_in_reach

#: Query rows, of all heads that share keys, up to which device memory bounds a kernel and not its products.
FEW_ROWS = 64
#: Keys per query row from which they make the time of such a kernel: of fewer, Q and O are as much to read
#: and write.
MANY_KEYS = 8


def decodes(problem: Problem) -> bool:
    """Tells whether there are few query rows for many keys, so that device memory bounds a kernel."""
    rows = problem.seqlen_q * problem.group
    return rows <= FEW_ROWS and keys_in_reach(problem) >= MANY_KEYS * rows
