"""How far from its place a row's keys may be and still weigh anything, where slopes press far ones down.

A score is at most the length of a row of queries times that of the longest row of keys, and slopes take from
it what grows with the distance (ALiBi); what the key at a row's own place scores is known. So beyond some
distance all keys together weigh less than float32 tells beside that one, and blocks walk no farther. It is a
bound by lengths (Cauchy and Schwarz), whatever the inputs are: of such whose lengths say little, all keys are
in reach.

Two launches find it: one the longest of every few rows of keys, the other the reach of every few of queries.
Gradients begin with what their forward pass knows of each row, its log-sum-exp: what weighs nothing beside
that has no gradient to tell of. There blocks keep keys, which all rows of a head pass by, and hand on what
they add up from one to the next; so one reach is found for all rows of the heads that share keys.
"""

from __future__ import annotations

from dataclasses import replace
from math import e, log, log2, sqrt
from typing import Any

import numpy as np

from ..expression import Constant, divided_up
from ..launch import BATCH, KEY_LENGTHS_ROLE, KEYS, KV_HEADS, Q_HEADS, REACH_ROLE, ROWS, Launch
from ..layout import DENSE
from ..limits import WARP
from ..problem import ITEM_BYTES, Problem
from ..scoring.asked import Scoring
from ..scoring.values import typical_values
from .workspace import Region

#: What is done about keys out of reach, and what that parameter of kernels is about.
WALKED, LEFT_OUT = "walked", "left_out"
FAR_KEYS = "keys so far off that slopes leave them no weight: walked, or left out by lengths of rows"
#: What asks for nothing but slopes. Windows beside them hide no key at a row's own place, and sinks make all
#: keys weigh less.
SLOPES_ALONE = Scoring(alibi=True)
#: Why blocks of several heads, and such as share keys, walk all.
OWN_REACH = "not made for blocks of several heads, nor for such as share keys"
#: Threads of a block of either launch, and the rows of keys, and of queries, that a warp of it takes.
REACH_THREADS, LENGTH_KEYS, REACH_ROWS = 128, 16, 64
#: The regions of a workspace that they leave.
KEY_LENGTHS, REACHES, REACH_OF_HEADS = "key_lengths", "reaches", "reach_of_heads"
#: Powers of two by which what is left out lies below what is known: those of float32,
#: and one for both sides.
REACH_DEPTH = 25.0
#: What all that is left out of a row weighs together at most, of what all its keys do.
LOST_WEIGHT = 2.0 ** (1 - REACH_DEPTH)
#: Of rows of random numbers, how much longer than their mean length the longest of many are, and how far
#: below nothing the least of some products of two rows is, in deviations of each.
LONGER, LOWER = 2.5, 2.4


def why_not_left_out(problem: Problem) -> str | None:
    """Says why kernels cannot leave out what is out of reach; None where they can."""
    if replace(problem.scoring, window=None, always=0, sinks=False) != SLOPES_ALONE:
        return "slopes alone must press them down, and no mask but causal ones and windows hide others"
    if problem.scores.needs_lists:
        return "first keys that a window leaves seen are no neighbours of the others"
    if problem.has_scales or problem.has_key_scales or problem.latent:
        return "made for queries, keys and values of one type, each there by itself"
    if problem.layout is not DENSE or problem.append is not None:
        return "made for queries and keys that lie there whole, with one length each"
    return None


def reach_launches() -> tuple[Launch, Launch]:
    """Returns the launches that find the reach of rows, in their order."""
    warps = REACH_THREADS // WARP
    return (
        Launch(REACH_THREADS, 0, warps * LENGTH_KEYS, role=KEY_LENGTHS_ROLE, of_keys=True),
        Launch(REACH_THREADS, 0, warps * REACH_ROWS, role=REACH_ROLE),
    )


def reach_regions(*, of_heads: bool = False) -> tuple[Region, ...]:
    """Returns where in a workspace what they find is; ``of_heads``: for gradients."""
    of_keys = BATCH * KV_HEADS * divided_up(KEYS, Constant(LENGTH_KEYS))
    lengths = Region(KEY_LENGTHS, of_keys, f"the length of the longest of {LENGTH_KEYS} rows of keys")
    if of_heads:
        return lengths, Region(
            REACH_OF_HEADS, BATCH * KV_HEADS, "how far from their places keys weigh anything"
        )
    of_rows = BATCH * Q_HEADS * divided_up(ROWS, Constant(REACH_ROWS))
    return (
        lengths,
        Region(REACHES, of_rows, f"how far from their places keys of {REACH_ROWS} rows weigh anything"),
    )


def reaches_of_heads(problem: Problem) -> tuple[float, ...]:
    """Returns how far the rows of each query head look, of random inputs and what slopes are timed with."""
    length = sqrt(problem.head_dim) + LONGER * sqrt(0.5)
    most = log2(e) * (length**2 / sqrt(problem.head_dim) + LOWER)
    found = []
    for slope in np.asarray(typical_values(problem)["slopes"])[0] * log2(e):
        keys = max(1.0, min(problem.seqlen_k, 1.0 / (log(2.0) * slope)))
        found.append(float((most + REACH_DEPTH + log2(keys)) / slope))
    return tuple(found)


def mean_tiles_in_reach(
    reaches: tuple[float, ...], places: tuple[int, int], span: tuple[int, int], size: int
) -> float:
    """Returns how many tiles of ``size`` keys, or rows, of those from the first of a ``span`` to before the
    second, are in reach of any of these places among them, the last of which is included, in the mean of
    heads."""
    first = np.maximum(span[0], places[0] - np.array(reaches)) // size
    end = -(-np.minimum(span[1], places[1] + np.array(reaches) + 1) // size)
    return float(np.maximum(end - first, 0).mean())


def work_in_front(problem: Problem) -> dict[str, Any]:
    """Returns what both launches add to a kernel's `Work`: they read queries once, and keys twice."""
    rows = problem.num_q_heads * problem.seqlen_q + 2 * problem.num_kv_heads * problem.seqlen_k
    read = ITEM_BYTES[problem.dtype] * problem.batch * rows * problem.head_dim
    return {"launches_in_front": len(reach_launches()), "bytes_in_front": read}
