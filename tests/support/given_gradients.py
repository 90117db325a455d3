"""What gradients are taken of: a call's arrays, what it made of them, and the gradient of that."""

from __future__ import annotations

from typing import Any

import numpy as np
from flashgen.tuner.evaluate import reference


def largest_share(found: np.ndarray, wanted: np.ndarray) -> float:
    """Returns the largest error of a head, as a share of the head; NaN where there is one."""
    errors = np.linalg.norm(found.astype(np.float64) - wanted, axis=(2, 3))
    return float((errors / np.maximum(np.linalg.norm(wanted, axis=(2, 3)), 1e-30)).max())


def given_of(q: Any, k: Any, v: Any, rng: np.random.Generator, **asked: Any) -> dict[str, Any]:
    """Returns all that kernels of gradients are given of q, k and v, in their type: outputs and log-sum-exps
    as the reference has them, asked so, and a random gradient of the outputs."""
    expected = reference.attention(q, k, v, **asked)
    dout = rng.standard_normal(expected.o.shape, dtype=np.float32).astype(q.dtype)
    given = {"q": q, "k": k, "v": v, "dout": dout, "o": expected.o.astype(q.dtype)}
    return given | {"lse": expected.lse.astype(np.float32)}
