"""What a report says in words: values, parts of a whole, the problem, the command that emits the winner."""

from __future__ import annotations

from ...gen.emit.options import lengths_options, shape_options
from ...gen.lengths import lengths_words
from ...gen.limits import PRESETS
from ...gen.problem import Problem
from ...gen.scoring.words import scoring_words
from ..cards.slug import SIM_PREFIX, same_card
from .charts.units import NO_BREAK
from .content import Report


def percent(part: float) -> str:
    """Writes a part of a whole in percent, with a digit more where it is small."""
    if 0 < part < 0.0005:
        return f"<{NO_BREAK}0.1{NO_BREAK}%"
    digits = 0 if part >= 0.0995 or part == 0 else 1
    return f"{100 * part:.{digits}f}{NO_BREAK}%"


def problem_words(problem: Problem) -> str:
    """Writes a problem's dtype, sizes, masks and changes of scores for people who do not know the options'
    names."""
    heads = f"{problem.num_q_heads} head{'s' if problem.num_q_heads != 1 else ''}"
    if problem.num_kv_heads != problem.num_q_heads:
        heads += f" ({problem.num_kv_heads} of keys and values)"
    lengths = f"{problem.seqlen_q} rows"
    if problem.seqlen_k != problem.seqlen_q:
        lengths = f"{problem.seqlen_q} queries, {problem.seqlen_k} keys"
    lengths += f", packed ({lengths_words(problem.varlen)})" if problem.varlen else ""
    lengths += f", pages of {problem.page_size}" if problem.page_size else ""
    lengths += f", {problem.append.words}" if problem.append is not None else ""
    precision = "" if problem.precision == "auto" else f" ({problem.precision})"
    values = "" if problem.head_dim_v == problem.head_dim else f" (values {problem.head_dim_v})"
    values = f" (latent values {problem.head_dim_v})" if problem.latent else values
    values += ", gradients" if problem.backward else ""
    asked = [*(["causal mask"] if problem.causal else []), *filter(None, [scoring_words(problem.scoring)])]
    mask = ", ".join(asked) or "no mask"
    keys = f" beside keys of {problem.kv_dtype}" if problem.kv_dtype else ""
    return (
        f"{problem.dtype}{precision}{keys}, batch {problem.batch}, {heads}, {lengths}, "
        f"head dim {problem.head_dim}{values}, {mask}"
    )


def emit_command(report: Report) -> str:
    """Writes the command that emits the best kernel for the report's problem and card."""
    problem, default = report.problem, Problem()
    options = shape_options(problem)
    if problem.batch != default.batch:
        options.append(f"--batch {problem.batch}")
    if problem.num_q_heads != default.num_q_heads:
        options.append(f"--heads {problem.num_q_heads}")
    if problem.num_kv_heads != problem.num_q_heads:
        options.append(f"--kv-heads {problem.num_kv_heads}")
    if problem.varlen:
        options += [*lengths_options(problem), f"--varlen {problem.varlen}"]
    elif problem.seqlen_q == problem.seqlen_k != default.seqlen_q:
        options.append(f"--seqlen {problem.seqlen_q}")
    elif problem.seqlen_q != problem.seqlen_k:
        options.append(f"--seqlen-q {problem.seqlen_q} --seqlen-k {problem.seqlen_k}")
    emulated = report.slug.startswith(SIM_PREFIX)
    card = next((name for name, limits in PRESETS.items() if same_card(limits.slug, report.slug)), None)
    if card is not None:
        options.insert(0, f"--device sim:{card}" if emulated else f"--preset {card}")
    return " ".join(["flashgen emit best.cu", *options])


def command_words(command: str) -> list[str]:
    """Splits a command where it may go on in a new line: before options, never between one and its value."""
    return command.replace(" --", "\n--").split("\n")
