"""Problems as calls have them: drawn at random, of types, head dims, lengths, groups and masks that nobody
tuned for, and those of suites."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

from flashgen.gen.problem import Problem
from flashgen.gen.scoring.asked import Scoring
from flashgen.tuner.suites import workloads

RANDOM, SUITES = "random", ("llm", "odd", "fp32", "masks", "decode", "varlen", "backward")
NUM_RANDOM, SEED = 200, 2026
#: Floating-point operations of a random problem, powers of ten between which batches are chosen; the most.
FLOPS_EXPONENTS, MOST_FLOPS = (8.0, 11.3), 2e11
#: Of a random problem's larger array, elements; blocks along a grid's second axis.
MOST_ELEMENTS, MOST_BATCH_HEADS, MOST_BATCH = 2**26, 65535, 4096


class Case(NamedTuple):
    suite: str
    name: str
    problem: Problem


def random_problems(count: int = NUM_RANDOM, seed: int = SEED) -> list[Case]:
    """Returns problems of all kinds that a call may have, the same for the same seed."""
    rng, found = random.Random(seed), []
    while len(found) < count:
        problem, kind = _drawn(rng)
        if problem is None:
            continue
        p = problem
        heads = f"{p.num_q_heads}" if p.group == 1 else f"{p.num_q_heads}/{p.num_kv_heads}"
        name = (
            f"r{len(found):03}-{p.dtype}-d{p.head_dim}-b{p.batch}-h{heads}-{p.seqlen_q}x{p.seqlen_k}-{kind}"
        )
        found.append(Case(RANDOM, name, p))
    return found


def _drawn(rng: random.Random) -> tuple[Problem | None, str]:
    """A problem and its mask's name, or None where what was drawn is none or too large."""

    def length() -> int:
        n = int(math.exp(rng.uniform(0, math.log(4096))) + 0.5)
        return 2 ** round(math.log2(n)) if rng.random() < 0.25 else n

    dtype = "f32" if rng.random() < 0.2 else rng.choice(("f16", "bf16", "bf16"))
    draw = rng.random()
    if draw < 0.5:
        d = rng.choice((32, 40, 48, 64, 64, 72, 80, 96, 112, 128, 128, 160, 192, 256))
    else:
        d = 8 * rng.randint(1, 32) if draw < 0.85 else rng.randint(1, 256)
    nq = length()
    nk = length() if rng.random() < 1 / 3 else nq
    if rng.random() < 1 / 3:
        kv_heads = rng.choice((1, 2, 4, 8))
        heads = kv_heads * rng.choice((2, 3, 4, 5, 7, 8))
    else:
        kv_heads = heads = rng.choice((1, 3, 4, 8, 12, 16, 20, 32))
    kind = rng.choices(("none", "causal", "window", "softcap", "alibi", "boolmask"), (30, 30, 12, 8, 10, 10))[
        0
    ]
    causal, scoring = kind == "causal", Scoring()
    if kind == "window":
        left = int(math.exp(rng.uniform(math.log(4), math.log(1024))))
        causal = rng.random() < 0.7
        scoring = Scoring(window=(left, 0 if causal else left))
    elif kind == "softcap":
        causal, scoring = rng.random() < 0.6, Scoring(softcap=rng.choice((20.0, 30.0, 50.0)))
    elif kind == "alibi":
        causal, scoring = rng.random() < 0.7, Scoring(alibi=True)
    elif kind == "boolmask":
        scoring = Scoring(bias="u8")
    flops = 2 * heads * nq * nk * d
    batch = max(1, round(10 ** rng.uniform(*FLOPS_EXPONENTS) / flops))
    most = (max(1, MOST_ELEMENTS // (heads * d * max(nq, nk))), MOST_BATCH_HEADS // heads, MOST_BATCH)
    batch = min(batch, *most)
    sizes = {"batch": batch, "num_q_heads": heads, "num_kv_heads": kv_heads, "seqlen_q": nq, "seqlen_k": nk}
    if batch * flops > MOST_FLOPS:
        return None, kind
    try:
        problem = Problem(dtype=dtype, causal=causal, scoring=scoring, head_dim=d, **sizes)
    except ValueError:
        return None, kind
    return problem, kind + "c" * (causal and kind != "causal")


def cases() -> list[Case]:
    """Returns random problems first, then the suites' in turns: time may not do for all."""
    found = random_problems()
    suites = [[Case(suite, each.name, each.problem) for each in workloads([suite])] for suite in SUITES]
    while any(suites):
        found += [suite.pop(0) for suite in suites if suite]
    return found
