"""What an emitted file holds: one kernel, or several in a module."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ..evaluate.outcome import Measurement
from ..shelf.bundle import Pick, kernels_of
from ..shelf.emitting import Emitted
from .words import figures, settings_words


def show_emitted(console: Console, target: Path, emitted: Emitted, beside: Sequence[Path] = ()) -> None:
    """Prints which kernel was written, why that one, and its figures."""
    lines = [f"wrote {target}: {emitted.how}", f"{emitted.variant.family}: {settings_words(emitted.variant)}"]
    if beside:
        lines.insert(1, f"and beside it {', '.join(path.name for path in beside)}")
    if emitted.measurement is not None:
        lines.append(figures(Measurement.from_dict(dict(emitted.measurement))))
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def show_bundle(console: Console, target: Path, picks: Sequence[Pick], num_bytes: int) -> None:
    """Prints what a module of several kernels holds, and where the nearest stands for what was asked."""
    count = len(kernels_of(picks))
    lines = [f"wrote {target}: {count} kernels, {num_bytes / 2**20:.1f} MiB"]
    exact = sum(pick.match.exact for pick in picks)
    if picks[0].asked is not None:
        lines[0] += f"; {exact} of {len(picks)} problems were tuned for just this"
    lines += [f"{pick.asked.name}: {pick.match.how}" for pick in picks if pick.asked and not pick.match.exact]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
