"""A benchmark run as people read it: tables of words and figures."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from math import floor

from rich.console import Console

from ...gen.families.ladder.family import STEPS
from ...gen.lengths import lengths_words
from ...gen.problem import Problem
from ..bench.contenders import LADDER
from ..bench.figures import (
    BEST,
    CUDNN,
    OUR_KERNELS,
    OURS,
    OURS_16_BITS,
    OURS_SAME_BITS,
    SAME_BITS,
    TOOK_LONGER,
    BenchRun,
    KernelErrors,
    Row,
    by_suite,
    contenders_of,
    rivals_of,
    scaled_of,
    summary,
)
from ..suites import SUITES
from .table import FASTER, SLOWER, Table
from .words import asked_words

#: Of the report's steps, the one that stands beside other contenders; all are in a table of their own.
LAST_STEP = LADDER + list(STEPS)[-1]
NOTHING = ""


def show(console: Console, run: BenchRun) -> None:
    """Prints all tables, in parts where they are wider than the terminal."""
    for table in tables(run):
        table.print(console)


def milliseconds(ms: float | None) -> str:
    return NOTHING if ms is None else f"{ms:.0f}" if ms >= 1e4 else f"{ms:#.4g}".rstrip(".")


def ratio(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def times_faster(value: float | None) -> str:
    """Writes how many times faster flashgen is, with a mark of whether it is: what is below 1 never reads as
    1."""
    if value is None:
        return NOTHING
    if value >= 1:
        return f"{FASTER} {value:.2f}"
    return f"{SLOWER} {value:.2f}" if value < 0.995 else f"{SLOWER} {floor(1e3 * value) / 1e3:.3f}"


def percent(value: float | None) -> str:
    return NOTHING if value is None else f"{100 * value:.0f} %"


def speed(value: float | None) -> str:
    return NOTHING if value is None else f"{value:#.3g}".rstrip(".")


def error(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1e}"


# -- one suite -----------------------------------------------------------------------------------------------


def suite_table(title: str, rows: Sequence[Row], run: BenchRun, *, names: bool = True) -> Table:
    """Returns a table of all contenders' milliseconds, ratios and the roofline. ``names``: the workloads'
    names lead, and the shape is left out."""
    shown, scaled = _shown(rows), scaled_of(rows)
    counted = {row.name for suite, of in by_suite(rows).items() if counts_keys(suite) for row in of}
    columns: list[tuple[str, Callable[[Row], str]]] = []
    if names:
        columns.append(("workload", lambda row: row.name))
    else:
        columns += SHAPE_COLUMNS
    columns.append((OURS, _ours))
    columns.append(("TFLOP/s", lambda row: NOTHING if row.name in counted else speed(row.tflops)))
    # Of latent attention now one bounds it, now the other.
    reading = counted | {row.name for row in rows if row.problem.latent}
    columns.append(("TB/s", lambda row: speed(row.key_tbps) if row.name in reading else NOTHING))
    columns += [(name, lambda row, name=name: _cell(row, name)) for name in shown]
    same_bits = [name for name in shown if name.endswith(SAME_BITS)]
    if same_bits:
        columns.append((OURS_SAME_BITS, lambda row: milliseconds(row.same_bits_ms)))
    columns += [(_scaled(n), lambda row, name=n: milliseconds(row.scaled_ms.get(name))) for n in scaled]
    columns += [(f"over {n}", lambda row, name=n: _ratio_here(row, name)) for n in (*shown, BEST)]
    columns += [(f"over {_scaled(n)}", lambda row, name=n: _ratio_scaled(row, name)) for n in scaled]
    columns.append(("SM MHz", lambda row: NOTHING if row.clock_mhz is None else f"{row.clock_mhz:.0f}"))
    columns.append(("peak", lambda row: _peak(row, row.peak_tflops, counted)))
    columns.append(("peak at SM MHz", lambda row: _peak(row, row.peak_at_clock, counted)))
    columns.append(("of roofline", lambda row: percent(row.of_roofline(run.ceilings))))
    columns.append(("bound by", lambda row: b.resource if (b := row.bound(run.ceilings)) else NOTHING))
    columns.append(("error", lambda row: error(row.cells[OURS].error if OURS in row.cells else None)))
    columns.append(("of PyTorch's", lambda row: ratio(row.error_ratio)))
    made = [(name, [cell(row) for row in rows]) for name, cell in columns]
    kept = [(name, cells) for name, cells in made if any(cells) or name in (OURS, "mask")]
    notes = [behind_words(rows), mean_words(rows, run), timed_words(rows)]
    if any(name == "SM MHz" and any(cells) for name, cells in made):
        notes.append(CLOCK_NOTE)
    if same_bits:
        notes.append(SAME_BITS_NOTE)
    if any(row.problem.has_scales for row in rows):
        notes.append(EIGHT_BITS_NOTE)
    if reading:
        notes.append("TB/s: of keys and values, read once.")
    nearest = [row.name for row in rows if row.ours and not row.exact]
    if nearest:
        notes.append(f"\\* by a kernel tuned for another shape: {', '.join(nearest)}.")
    later = [row.name for row in rows if row.tuned_since]
    if later:
        told = "all of them" if len(later) == len(rows) else ", ".join(later)
        notes.append(
            f"† by the kernel of then; another was tuned since, and not yet timed beside others: {told}."
        )
    if any(c.scaled_from for row in rows for n, c in row.cells.items() if n in shown):
        notes.append("~ scaled from a shorter length.")
    late = [
        f"{row.name}: {name} {cell.reason}"
        for row in rows
        for name, cell in row.cells.items()
        if cell.reason.startswith(TOOK_LONGER)
    ]
    if late:
        notes.append(f"Not ready in time, and not timed: {', '.join(late)}.")
    doubts = [(row.name, why) for row in rows for why in row.disturbances]
    if doubts:
        notes.append(
            f"{len({name for name, _ in doubts})} of {len(rows)} doubtful, such as {': '.join(doubts[0])}."
        )
    if scaled:
        by = "cuDNN's" if all(row.ms(CUDNN) for row in rows if row.scaled_ms) else "others'"
        told = " and ".join(dict.fromkeys(row.reference for row in rows if row.scaled_ms))
        notes.append(f"Scaled: as told by {told}, times {by} here over {by} there.")
    return Table(
        title,
        tuple(name for name, _ in kept),
        tuple(zip(*(cells for _, cells in kept), strict=True)),
        tuple(note for note in notes if note),
        left=1 if names else 0,
    )


#: What the columns of clocks and peaks hold, those of gradients that have the same bits every run, and those
#: beside eight bits.
CLOCK_NOTE = (
    "SM MHz: the median clock of the multiprocessors while flashgen was timed; peak: TFLOP/s of the data "
    "sheet, then at that clock."
)
SAME_BITS_NOTE = (
    f"{SAME_BITS}: gradients of the same bits every run; others' are held against flashgen's, of its fastest "
    "kernel where that makes such, else of the one that calls get which ask for them."
)
EIGHT_BITS_NOTE = (
    f"All but {OURS} read the values in bfloat16, from which those of eight bits were rounded; errors are "
    f"against float64 of these. {OURS_16_BITS}: flashgen's own kernel of the same shape in bfloat16, which "
    f"over {BEST} counts."
)


def _ours(row: Row) -> str:
    """flashgen's time, marked where it is that of another shape's kernel, or of one that served before."""
    mark = "" if row.exact else "*"
    return milliseconds(row.ours) + (mark + ("†" if row.tuned_since else "") if row.ours else "")


def _shown(rows: Sequence[Row]) -> list[str]:
    """The contenders that stand beside flashgen: of the report's steps the last alone."""
    return [name for name in rivals_of(rows) if not name.startswith(LADDER) or name == LAST_STEP]


def _scaled(name: str) -> str:
    return f"{name}, scaled"


def _ratio_here(row: Row, name: str) -> str:
    """What a run found by itself; another's stands in a column of its own."""
    return times_faster(row.ratio(name)) if name == BEST or row.ms(name) else NOTHING


def _ratio_scaled(row: Row, name: str) -> str:
    return times_faster(row.ratio(name)) if name in row.scaled_ms else NOTHING


def _peak(row: Row, value: float | None, counted: Container[str]) -> str:
    """Of what is told in bytes, the arithmetic's peak says nothing."""
    return NOTHING if row.name in counted or row.clock_mhz is None else speed(value)


def _cell(row: Row, name: str) -> str:
    cell = row.cells.get(name)
    if cell is None or cell.ms is None:
        return NOTHING
    return ("~" if cell.scaled_from else "") + milliseconds(cell.ms)


def _heads(problem: Problem) -> str:
    if problem.num_kv_heads == problem.num_q_heads:
        return str(problem.num_q_heads)
    return f"{problem.num_q_heads} / {problem.num_kv_heads}"


def _seqlen(problem: Problem) -> str:
    if problem.seqlen_k == problem.seqlen_q:
        return str(problem.seqlen_q)
    return f"{problem.seqlen_q} x {problem.seqlen_k}"


def _type(problem: Problem) -> str:
    """The data type and, unless automatic, the precision."""
    return problem.dtype + ("" if problem.precision == "auto" else f"_{problem.precision}")


def _head_dims(problem: Problem) -> str:
    same = problem.head_dim_v == problem.head_dim
    return str(problem.head_dim) + ("" if same else f" / {problem.head_dim_v}")


SHAPE_COLUMNS: list[tuple[str, Callable[[Row], str]]] = [
    ("dtype", lambda row: _type(row.problem)),
    ("batch", lambda row: str(row.problem.batch)),
    ("heads", lambda row: _heads(row.problem)),
    ("seqlen", lambda row: _seqlen(row.problem)),
    ("head dim", lambda row: _head_dims(row.problem)),
    ("lengths", lambda row: lengths_words(row.problem.varlen) if row.problem.varlen else NOTHING),
    ("page", lambda row: str(row.problem.page_size or NOTHING)),
    ("mask", lambda row: asked_words(row.problem) or NOTHING),
]


def behind_words(rows: Sequence[Row], *, named: bool = True) -> str:
    """Writes on how many rows flashgen is behind somebody and, where they are ``named``, on which, behind
    whom and how far; and on how many, or which, others were timed and flashgen was not. Empty where nobody
    was timed beside it."""
    shown = set(_shown(rows))
    here = {r.name: {n: x for n, x in r.behind.items() if n in shown} for r in rows if r.rivals and r.ours}
    elsewhere = {row.name: row.behind_scaled for row in rows if row.scaled_ms and row.ours}
    parts = [_behind("Behind", here, named), _behind("Behind scaled times", elsewhere, named)]
    missing = [row.name for row in rows if row.rivals and not row.ours]
    if missing:
        names = f": {', '.join(missing)}" if named else ""
        parts.append(f"Others alone were timed on {len(missing)}{names}.")
    text = " ".join(filter(None, parts))
    is_behind = missing or any(here.values()) or any(elsewhere.values())
    return f"{SLOWER} {text}" if is_behind else text


def _behind(words: str, ratios: Mapping[str, Mapping[str, float]], named: bool) -> str:
    """``ratios``: those below 1, by workload and rival."""
    told = [
        f"{name} ({', '.join(f'{rival} {times_faster(each)}' for rival, each in of.items())})"
        for name, of in ratios.items()
        if of
    ]
    if not ratios:
        return NOTHING
    names = f": {', '.join(told)}" if told and named else ""
    return f"{words} on {len(told)} of {len(ratios)} rows{names}."


def timed_words(rows: Sequence[Row]) -> str:
    """Writes who was timed in the run itself, where others were not."""
    here, elsewhere = _shown(rows), scaled_of(rows)
    if not here or not elsewhere:
        return NOTHING
    told = f"Timed beside {OURS} in its run: {', '.join(here)}."
    return f"{told} In another run, and scaled: {', '.join(elsewhere)}."


def mean_words(rows: Sequence[Row], run: BenchRun) -> str:
    """Writes geometric means and least ratios in a sentence."""
    found = summary(rows, run.ceilings)
    parts = [
        f"over {words} {found[name]['geomean']:.3f} (least {found[name]['least']:.3f}"
        + (f", {found[name]['workloads']} of {len(rows)})" if found[name]["workloads"] != len(rows) else ")")
        for name, words in (
            *((n, n) for n in _shown(rows)),
            *((n, f"{n} (scaled)") for n in scaled_of(rows) if n not in _shown(rows)),
            (BEST, "the best"),
        )
        if name in found
    ]
    if not parts:
        return NOTHING
    return f"Times faster, geometric mean of {len(rows)} workloads: {', '.join(parts)}."


# -- the whole run -------------------------------------------------------------------------------------------


def counts_keys(suite: str) -> bool:
    """Returns whether a suite's speed is told in bytes of keys and values."""
    return suite in SUITES and SUITES[suite].counts_keys


def title_of(suite: str) -> str:
    return f"{suite}: {SUITES[suite].title}" if suite in SUITES else suite


def summary_table(run: BenchRun) -> Table:
    """Returns a table with a row for each suite: geometric means, least ratios, the share of the roofline.
    On which workloads flashgen is behind stands below each suite's own table."""
    rows = []
    for name, members in by_suite(run.rows).items():
        found, scaled = summary(members, run.ceilings), scaled_of(members)
        share = found.pop("roofline", None)
        over = {
            each: f"{times_faster(figures['geomean'])} ({times_faster(figures['least'])})"
            for each, figures in found.items()
            if not each.startswith(LADDER)
        }
        best = over.pop(BEST, NOTHING)
        # Those timed in the run, then those of another day.
        told = [f"{each} {ratios}" for each, ratios in over.items() if each not in scaled]
        told += [f"{each} (scaled) {ratios}" for each, ratios in over.items() if each in scaled]
        behind = sum(bool(row.behind) for row in members)
        timed = sum(bool(row.rivals and row.ours) for row in members)
        behind_on = f"{SLOWER} {behind} of {timed}" if behind else f"0 of {timed}"
        of_roofline = NOTHING if share is None else percent(share["geomean"])
        rows.append((name, "\n".join(told), str(len(members)), behind_on, best, of_roofline))
    return Table(
        f"{run.device}: times faster, geometric mean (least) by suite",
        ("suite", "over", "workloads", "behind on", f"over {BEST}", "of roofline"),
        tuple(rows),
        tuple(filter(None, [behind_words(run.rows, named=False)])),
        left=2,
    )


def ladder_table(run: BenchRun) -> Table | None:
    """Returns a table of the report's steps by case, and the tuned kernel below."""
    rows = [row for row in run.rows if any(name.startswith(LADDER) for name in row.cells)]
    names = [LADDER + step for step in STEPS]
    names = [name for name in names if any(row.ms(name) for row in rows)]
    if not names:
        return None
    lines = [
        (
            name.removeprefix(LADDER),
            STEPS[name.removeprefix(LADDER)].title,
            *(_cell(row, name) for row in rows),
        )
        for name in names
    ]
    lines.append((OURS, "the tuned kernel", *(_cell(row, OURS) for row in rows)))
    scaled = any(row.cells[n].scaled_from for row in rows for n in names if n in row.cells)
    return Table(
        "the report's steps, milliseconds",
        ("step", "what", *(row.name for row in rows)),
        tuple(lines),
        ("~ scaled from a shorter length: one call would take too long.",) if scaled else (),
        left=2,
    )


def host_table(run: BenchRun) -> Table | None:
    names = list(dict.fromkeys(name for times in run.host_us.values() for name in times))
    if not names:
        return None
    return Table(
        "the caller's time per call on a tiny problem, microseconds",
        ("call", *run.host_us),
        tuple(
            (name, *(f"{t[name]:.1f}" if name in t else NOTHING for t in run.host_us.values()))
            for name in names
        ),
        left=1,
    )


def ceilings_table(run: BenchRun) -> Table | None:
    """Returns a table of the ceilings that the roofline is drawn with."""
    units = {"ex2": ("T/s", 1e12), "copy": ("TB/s", 1e12)}
    rows = []
    for name, rate in run.ceilings.rates.items():
        unit, scale = units.get(name, ("TFLOP/s", 1e12))
        rows.append((CEILING_WORDS.get(name, name.replace("_", " ")), speed(rate / scale), unit))
    return Table("ceilings", ("what", "at most", "unit"), tuple(rows), left=1) if rows else None


CEILING_WORDS = {
    "ffma": "float32 multiply-adds alone",
    "ex2": "exponentials alone",
    "mma_bf16": "mma.sync alone, bf16 or f16",
    "mma_f16": "mma.sync alone, f16",
    "mma_tf32": "mma.sync alone, tf32",
    "wgmma_bf16": "wgmma alone, bf16 or f16",
    "wgmma_e4m3": "wgmma alone, e4m3",
    "gemm_f32": "PyTorch's product, float32",
    "gemm_tf32": "PyTorch's product, tf32",
    "gemm_f16": "PyTorch's product, f16",
    "gemm_bf16": "PyTorch's product, bf16",
    "copy": "copy on the card, read plus written",
}


def errors_table(errors: Sequence[KernelErrors]) -> Table:
    """Returns a table of the largest errors by dtype, head dims and inputs, over all kernels and both
    masks."""
    names = list(dict.fromkeys(name for each in errors for name in each.errors if name != OURS))
    groups: dict[tuple[str, int, str, str], list[KernelErrors]] = {}
    for each in errors:
        p = each.problem
        groups.setdefault((_type(p), p.head_dim, _head_dims(p), each.inputs), []).append(each)
    lines = []
    for (kind, _, dims, inputs), members in sorted(groups.items()):
        worst = {n: _largest(m.errors.get(n) for m in members) for n in (OURS, *names)}
        theirs = [value for name in names if name not in OUR_KERNELS and (value := worst[name])]
        ours = worst[OURS]
        least = ours / min(theirs) if ours is not None and theirs else None
        lines.append((kind, dims, inputs, *(error(worst[n]) for n in (OURS, *names)), ratio(least)))
    return Table(
        "largest errors against float64, per head",
        ("dtype", "head dim", "inputs", OURS, *names, "over the least"),
        tuple(lines),
        repeated=3,
    )


def _largest(values: Iterable[float | None]) -> float | None:
    """NaN where one is; None without any."""
    known = [value for value in values if value is not None]
    return next((value for value in known if value != value), max(known, default=None))


def about(run: BenchRun) -> str:
    """Says where and with what the figures were taken."""
    names = {"torch": "PyTorch", "cuda": "its CUDA", "cudnn": "cuDNN", "triton": "Triton"}
    versions = [f"{names.get(name, name)} {version}" for name, version in run.libraries.items()]
    parts = [
        run.device,
        *versions,
        f"driver {run.driver}",
        run.toolkit,
        f"flashgen {run.flashgen}",
        " and ".join(sorted({row.began or run.began for row in run.rows} or {run.began})),
    ]
    return ", ".join(parts)


def tables(run: BenchRun) -> list[Table]:
    """Returns all tables that there are of a run."""
    found: list[Table | None] = [
        suite_table(title_of(name), rows, run)
        for name, rows in by_suite(run.rows).items()
        if contenders_of(rows) and any(row.cells for row in rows)
    ]
    found.append(ladder_table(run))
    if run.errors:
        found.append(errors_table(run.errors))
    found += [ceilings_table(run), host_table(run)]
    if any(row.ours for row in run.rows):
        found.append(summary_table(run))
    return [table for table in found if table is not None]


def row_line(row: Row) -> str:
    """Returns a row in one line, for progress."""
    parts = [f"{row.name}: {OURS} "]
    ours = row.cells.get(OURS)
    parts[0] += (
        f"{milliseconds(row.ours)} ms" if row.ours else f"not timed ({ours.reason if ours else 'no cell'})"
    )
    for name, cell in row.cells.items():
        if name != OURS and cell.ms is not None:
            over = row.ratio(name)
            parts.append(f"{name} {_cell(row, name)}" + (f" ({times_faster(over)}x)" if over else ""))
    return ", ".join(parts)
