"""What a Markdown file shows of a benchmark run, between markers that say what is wanted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from ..bench.figures import BenchRun, Row, by_suite
from ..errors import FlashgenError
from ..suites import SUITES
from .bench import about, ceilings_table, errors_table, host_table, ladder_table, suite_table, summary_table
from .marked_files import read_marked, write_filled

#: Begins and ends what is generated in a Markdown file: ``<!-- bench:llm odd -->`` ... ``<!-- /bench -->``.
SECTION = re.compile(r"(<!-- bench:([^>]*?) -->\n).*?(<!-- /bench -->)", re.DOTALL)


def fill(text: str, run: BenchRun) -> str:
    """Returns the text with what stands between its markers generated anew.

    A marker names suites or patterns of workloads (``bench:fp32 bf16-d64-*``), or one of ``summary``,
    ``ladder``, ``host``, ``ceilings``, ``errors`` and ``about``, or ``plots`` and the folder of those wanted
    (``bench:plots plots/llm plots/roofline``). Of suites that were not timed yet it says so, and who times
    them, and their plots are left out.

    Raises:
        FlashgenError: a marker names what the run does not have.
    """

    def filled(found: re.Match[str]) -> str:
        body = section(found[2], run)
        return f"{found[1]}{body}\n{found[3]}" if body else f"{found[1]}{found[3]}"

    return SECTION.sub(filled, text)


def fill_file(path: Path, run: BenchRun) -> None:
    """Generates anew what stands between a file's markers.

    Raises:
        FlashgenError: the file cannot be read or has no markers, or one names what the run does not have.
    """
    text = read_marked(path, SECTION, "<!-- bench:llm -->` ... `<!-- /bench -->")
    write_filled(path, fill(text, run))


def section(words: str, run: BenchRun) -> str:
    """Returns what a marker of those words encloses. Raises FlashgenError where the run does not have it."""
    whole = {
        "summary": lambda: summary_table(run),
        "ladder": lambda: ladder_table(run),
        "host": lambda: host_table(run),
        "ceilings": lambda: ceilings_table(run),
        "errors": lambda: errors_table(run.errors) if run.errors else None,
    }
    if words == "about":
        return about(run)
    if words.startswith("plots "):
        drawn = [each for each in words.split()[1:] if _is_drawn(Path(each).name, run)]
        return "\n\n".join(f"![{Path(each).name}, {run.device}]({each}.svg)" for each in drawn)
    if words in whole:
        table = whole[words]()
    else:
        rows = chosen(words, run.rows)
        if not any(row.cells for row in rows) and set(words.split()) <= set(SUITES):
            return f"Not timed yet: `flashgen bench {words}` does."
        table = suite_table(words, rows, run, names=False) if rows else None
    if table is None:
        raise FlashgenError(
            f"the marker `bench:{words}` asks for what the run does not have; run `flashgen bench` for it"
        )
    return table.markdown()


def _is_drawn(name: str, run: BenchRun) -> bool:
    """Whether there is a plot of that name: of a suite once flashgen was timed on it."""
    return name not in SUITES or any(row.ours for row in by_suite(run.rows).get(name, ()))


def chosen(words: str, rows: Sequence[Row]) -> list[Row]:
    """Returns the rows of the suites and patterns named."""
    suites = by_suite(rows)
    names: dict[str, Row] = {}
    for word in words.split():
        members = suites.get(word) or [row for row in rows if fnmatch(row.name, word)]
        names |= {row.name: row for row in members}
    return list(names.values())
