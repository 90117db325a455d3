"""Times, settings and problems in words, as every table and line tells them."""

from __future__ import annotations

from rich.console import Console

from ...gen.lengths import lengths_words
from ...gen.problem import Problem
from ...gen.scoring.words import scoring_words
from ...gen.variant import Variant
from ..evaluate.outcome import Measurement
from ..option_words import word

#: Columns below which tables lose words.
MIN_TABLE_WIDTH = 80


def microseconds(us: float) -> str:
    """Writes a time in the unit that reads best."""
    if us >= 1e6:
        return f"{us / 1e6:.3f} s"
    return f"{us / 1e3:.3f} ms" if us >= 1e3 else f"{us:.1f} us"


def changed_settings(variant: Variant) -> str:
    """Writes the parameters that are not the family's defaults, as ``--set`` takes them."""
    return differing_settings(variant, type(variant)()) or "defaults"


def differing_settings(variant: Variant, other: Variant) -> str:
    """Writes the parameters in which a variant differs from another of its family."""
    theirs = other.to_dict()
    return " ".join(f"{k}={word(v)}" for k, v in variant.to_dict().items() if v != theirs[k])


def widen(console: Console) -> None:
    """Gives a console the width that tables need; a narrower terminal wraps their lines.

    Squeezed below it, tables would lose words.
    """
    console.width = max(console.width, MIN_TABLE_WIDTH)


def figures(measurement: Measurement) -> str:
    """Writes a measurement's time and speed, and whether they are predicted."""
    kind = "predicted " if measurement.predicted else ""
    return f"{kind}{microseconds(measurement.median_us)}, {measurement.tflops:.2f} TFLOP/s"


def settings_words(variant: Variant) -> str:
    """Writes all parameters of a variant, as ``--set`` takes them."""
    return " ".join(f"{k}={word(v)}" for k, v in variant.to_dict().items())


def asked_words(problem: Problem) -> str:
    """Writes what is asked of a problem's masks and scores, ``causal, window 127,0``; empty where nothing
    is."""
    causal = ["causal"] if problem.causal else []
    return ", ".join([*causal, *filter(None, [scoring_words(problem.scoring)])])


def problem_words(problem: Problem) -> str:
    """Writes a problem's dtype, sizes, masks and changes of scores."""
    mask = asked_words(problem) or "no mask"
    heads = str(problem.num_q_heads)
    if problem.num_kv_heads != problem.num_q_heads:
        heads += f" (kv {problem.num_kv_heads})"
    lengths = f"seqlen {problem.seqlen_q}"
    if problem.seqlen_k != problem.seqlen_q:
        lengths = f"seqlen_q {problem.seqlen_q}, seqlen_k {problem.seqlen_k}"
    lengths += f", packed ({lengths_words(problem.varlen)})" if problem.varlen else ""
    lengths += f", pages of {problem.page_size}" if problem.page_size else ""
    lengths += f", {problem.append.words}" if problem.append is not None else ""
    precision = "" if problem.precision == "auto" else f" ({problem.precision})"
    values = "" if problem.head_dim_v == problem.head_dim else f", dv {problem.head_dim_v}"
    keys = f", keys {problem.kv_dtype}" if problem.kv_dtype else ""
    values += " (latent)" if problem.latent else ""
    values += ", gradients" if problem.backward else ""
    return (
        f"{problem.dtype}{precision}{keys}, batch {problem.batch}, heads {heads}, {lengths}, "
        f"d {problem.head_dim}{values}, {mask}"
    )
