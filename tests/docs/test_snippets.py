"""Every piece of Python of the README and the pages runs: with arguments that there are, and on a card."""

from __future__ import annotations

import pytest

from tests.support.depth import sampled
from tests.support.emulated import needs_compiler
from tests.support.snippets import NeedsMore, Snippet, run_bound, run_for_real, snippets

ALL = snippets()
#: Of the page that shows each mask by a line of its own, some stand for all.
MASKS = [each for each in ALL if each.page.name == "masks.md"]


@pytest.mark.parametrize("snippet", ALL, ids=str)
def test_arguments_are_those_that_there_are(snippet: Snippet, monkeypatch: pytest.MonkeyPatch) -> None:
    _import(snippet)
    run_bound(snippet, monkeypatch)


@needs_compiler
@pytest.mark.parametrize(
    "snippet",
    [*sampled([each for each in ALL if each not in MASKS], 0), *sampled(MASKS, 0, thorough=6)],
    ids=str,
)
def test_it_runs_on_an_emulated_card(snippet: Snippet, monkeypatch: pytest.MonkeyPatch) -> None:
    _import(snippet)
    try:
        run_for_real(snippet, monkeypatch)
    except NeedsMore as needed:
        pytest.skip(str(needed))


def _import(snippet: Snippet) -> None:
    for name in sorted(snippet.imported & {"torch", "transformers", "jax", "cupy"}):
        pytest.importorskip(name, reason=f"needs {name}")
