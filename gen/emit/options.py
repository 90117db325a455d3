"""Problems, variants and cards as options of the command line."""

from __future__ import annotations

import shlex

from ..limits import preset_of
from ..problem import Problem
from ..scoring.asked import Scoring
from ..variant import Variant

#: Masks and changes that have an option of their own name.
_BY_NAME = ("chunk", "prefix", "lengths", "documents", "dilation", "tree", "softcap", "alibi")


def shape_options(problem: Problem) -> list[str]:
    """Returns the command-line options, besides the lengths, that say which problem a kernel is made for."""
    options = [f"--dtype {problem.dtype}"] if problem.dtype != "f32" else []
    options += [f"--kv-dtype {problem.kv_dtype}"] if problem.kv_dtype else []
    options += [f"--precision {problem.precision}"] if problem.precision != "auto" else []
    options.append(f"--d {problem.head_dim}")
    options += [f"--dv {problem.head_dim_v}"] if problem.head_dim_v != problem.head_dim else []
    options += ["--latent"] if problem.latent else []
    options += ["--backward"] if problem.backward else []
    options += [f"--page-size {problem.page_size}"] if problem.page_size else []
    options += problem.append.options if problem.append is not None else []
    options += ["--causal"] if problem.causal else []
    return options + scoring_options(problem.scoring)


def scoring_options(scoring: Scoring) -> list[str]:
    """Returns the options that ask for masks and changes of scores, an option and its value an entry."""
    options = []
    if scoring.window is not None:
        sides = ["all" if side < 0 else f"{side}" for side in scoring.window]
        options.append(f"--window {','.join(sides + [f'{scoring.always}'] * bool(scoring.always))}")
    for name in (*_BY_NAME, "bias", "sinks"):
        value = getattr(scoring, name)
        if value is True:
            options.append(f"--{name}")
        elif value:
            options.append(f"--{name} {_shortest(value)}")
    for name in ("mask", "score"):
        if text := getattr(scoring, name):
            options.append(f"--{name} {shlex.quote(text)}")
    options += [f"--buffer {name}={dtype}" for name, dtype in scoring.buffers]
    return options + [f"--scalar {name}={value!r}" for name, value in scoring.scalars]


def size_options(problem: Problem) -> list[str]:
    """Returns the options that say the problem's batch, heads and lengths, where they are not as usual."""
    usual = Problem(dtype=problem.dtype)
    options = [f"--batch {problem.batch}"] if problem.batch != usual.batch else []
    options += [f"--heads {problem.num_q_heads}"] if problem.num_q_heads != usual.num_q_heads else []
    kv_heads = 1 if problem.latent else problem.num_q_heads
    options += [f"--kv-heads {problem.num_kv_heads}"] if problem.num_kv_heads != kv_heads else []
    if problem.varlen:
        # Lengths that are not said would be those that the text speaks of.
        return [*options, *lengths_options(problem), f"--varlen {problem.varlen}"]
    if problem.seqlen_q == problem.seqlen_k:
        return options + ([f"--seqlen {problem.seqlen_q}"] if problem.seqlen_q != usual.seqlen_q else [])
    options += [f"--seqlen-q {problem.seqlen_q}"] if problem.seqlen_q != usual.seqlen_q else []
    return options + ([f"--seqlen-k {problem.seqlen_k}"] if problem.seqlen_k != usual.seqlen_k else [])


def lengths_options(problem: Problem) -> list[str]:
    """Returns the options that say the longest sequences, whatever is usual."""
    if problem.seqlen_q == problem.seqlen_k:
        return [f"--seqlen {problem.seqlen_q}"]
    return [f"--seqlen-q {problem.seqlen_q}", f"--seqlen-k {problem.seqlen_k}"]


def card_option(device: str, arch: int) -> str:
    """Returns the option that names a card by its preset, or where it is none a card of its architecture."""
    return f"--device {preset_of(device) or f'sm_{arch}'}"


def variant_options(variant: Variant) -> list[str]:
    """Returns the options that hold a variant's parameters; what others imply is not said."""
    names = [parameter.name for parameter in variant.named_parameters()]
    held = [f"--set {name}={str(getattr(variant, name)).lower()}" for name in names]
    return [f"--family {variant.family}", *held]


def _shortest(value: float | str) -> str:
    """A value as it is read back: whole numbers without a point."""
    return f"{int(value)}" if isinstance(value, float) and value.is_integer() else f"{value}"
