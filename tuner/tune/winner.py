"""The winner of a run, kept with the trials and as files of the library, unless a faster one is known."""

from __future__ import annotations

import contextlib
import datetime
from dataclasses import dataclass
from pathlib import Path

from optuna.study import Study

from ...gen.emit.cuda import emit_cuda
from ...gen.emit.module import emit_thin_module, why_no_module
from ...gen.render import render
from ..cards.slug import device_slug
from ..errors import FlashgenError
from ..evaluate.outcome import Outcome, TunedKernel
from ..shelf import library, records
from ..shelf.winners import TUNED
from ..store.studies import storage_errors
from ..version import flashgen_version
from .options import TuneOptions


@dataclass(frozen=True)
class Kept:
    """The winner and where it is kept.

    ``faster`` is the library's kernel, where what was found with parameters held or families left out is
    slower; then ``paths`` were not written.
    """

    kernel: TunedKernel
    slug: str
    paths: library.Paths
    faster: Path | None


def keep(
    options: TuneOptions, winner: Outcome, toolkit: str, study: Study, tuned_at: str | None = None
) -> Kept:
    """Keeps the winner with the trials of its study and as files; ``tuned_at`` is when it was timed, where
    that was not now.

    Whichever place fails, the other has the winner, and `emit` finds it.

    Raises:
        FlashgenError: one of the places cannot be written.
    """
    rendered = render(winner.variant, options.problem, options.limits)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    kernel = _tuned(options, winner, rendered.source, toolkit, tuned_at or now)
    slug = device_slug(options.device)
    paths = library.Paths.of(options.out, slug, kernel.problem.name)
    faster = _faster_in_library(options, paths.json, kernel)
    with contextlib.ExitStack() as stack:
        if faster is None:
            figures = records.figures(kernel)
            told = {"device": kernel.device, "measurement": figures}
            has_module = why_no_module(rendered.problem) is None
            stack.callback(
                library.write,
                options.out,
                slug,
                kernel,
                cuda=emit_cuda(rendered, **told),
                module=emit_thin_module(rendered, **told) if has_module else None,
            )
        with storage_errors(options.storage):
            study.set_user_attr(TUNED, records.to_record(kernel))
    return Kept(kernel, slug, paths, faster)


def _tuned(options: TuneOptions, winner: Outcome, source: str, toolkit: str, tuned_at: str) -> TunedKernel:
    assert winner.measurement is not None
    return TunedKernel(
        problem=options.problem,
        variant=winner.variant,
        source=source,
        measurement=winner.measurement,
        device=options.limits.name,
        arch=options.limits.arch,
        driver=options.device.driver,
        toolkit=toolkit,
        flashgen=flashgen_version(),
        seed=options.seed,
        tuned_at=tuned_at,
    )


def _faster_in_library(options: TuneOptions, path: Path, kernel: TunedKernel) -> Path | None:
    """With parameters held or families left out, a winner must not replace a faster kernel found without."""
    if not path.exists():
        return None
    with contextlib.suppress(FlashgenError):
        known = library.read(path).kernel
        narrowed = bool(options.held) or type(known.variant) not in options.families
        faster = known.measurement.median_us < kernel.measurement.median_us
        # An interrupted run leaves the figures of one trial; timed again, the same variant has others.
        if narrowed and faster and known.variant != kernel.variant:
            return path
    return None
