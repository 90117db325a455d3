"""A family's space: what each rule removed, the survivors, and the verdict on held parameters."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from ..predict.space_survey import SpaceSurvey
from .words import differing_settings, microseconds, problem_words, settings_words, widen


def show_space(console: Console, survey: SpaceSurvey) -> None:
    """Prints what each rule removed, the survivors and, for held parameters, the verdict."""
    widen(console)
    catalogue = survey.catalogue
    limits, problem = catalogue.limits, catalogue.problem
    console.print(
        f"{catalogue.family.family}, {problem_words(problem)}, {limits.name} ({limits.sm})",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    rules = Table()
    rules.add_column("rule")
    rules.add_column("variants", justify="right")
    rules.add_row("all combinations", f"{catalogue.total:,}")
    for name, count in sorted(catalogue.removed.items(), key=lambda each: -each[1]):
        rules.add_row(f"removed by {name}", f"{count:,}")
    rules.add_row("legal", f"{len(catalogue):,}", style="bold")
    console.print(rules)
    if catalogue.waived:
        text = f"waived, since nothing else would be left: the advice on {', '.join(catalogue.waived)}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    if survey.survivors:
        show_survivors(console, survey)
    if survey.verdict is not None:
        show_verdict(console, survey)


def show_survivors(console: Console, survey: SpaceSurvey) -> None:
    """Lists the fastest predicted variant in full, the next ones by what differs from it."""
    first, total = survey.survivors[0].variant, len(survey.catalogue)
    among = "" if survey.looked_at == total else f" of {survey.looked_at:,} looked at"
    table = Table()
    for heading in ("predicted", "smem", "regs", "blocks"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("variant, as it differs from the first", overflow="fold")
    for survivor in survey.survivors:
        table.add_row(
            microseconds(survivor.predicted_us or 0.0),
            str(survivor.smem_bytes),
            f"~{survivor.registers}",
            str(survivor.blocks_per_sm),
            differing_settings(survivor.variant, first) or settings_words(first),
        )
    console.print(
        f"the {len(survey.survivors)} fastest predicted{among} (smem in bytes per block, registers estimated "
        "per thread, blocks per SM)",
        highlight=False,
    )
    console.print(table)


def show_verdict(console: Console, survey: SpaceSurvey) -> None:
    """Prints whether the variant with the held parameters is legal, and what stands against which limit."""
    verdict, limits = survey.verdict, survey.catalogue.limits
    assert verdict is not None
    lines = [f"{verdict.variant.family}: {settings_words(verdict.variant)}"]
    if verdict.completed:
        lines.append(f"(not given, so at their defaults: {', '.join(verdict.completed)})")
    if verdict.use is None:
        lines.append(f"illegal: {verdict.rule}: {verdict.reason}")
    else:
        use = verdict.use
        lines += [
            f"legal, but left out of the search: {verdict.advice}" if verdict.advice else "legal:",
            f"  shared memory: needs {use.smem_bytes} bytes, {limits.sm} allows {limits.smem_per_block}",
            f"  registers: about {use.registers} per thread, {limits.max_registers_per_thread} allowed",
            f"  threads: {use.threads} per block, {limits.max_threads_per_block} allowed",
            f"  occupancy: {use.blocks_per_sm} blocks per SM, {100 * use.occupancy:.0f} % of its threads",
            f"  predicted: {microseconds(use.predicted_us or 0.0)}",
        ]
    if verdict.nearest is not None:
        lines.append(
            f"{len(survey.catalogue):,} variants with the held parameters are legal; the nearest has "
            f"{differing_settings(verdict.nearest, verdict.variant)}"
        )
    elif not verdict.legal and verdict.completed:
        lines.append("no variant with the held parameters is legal; hold fewer or others")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
