"""The winner of a run, kept with the trials and as files of the library, unless a faster one is known."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from optuna.study import Study

from ...gen.emit.cuda import emit_cuda
from ...gen.emit.module import emit_thin_module
from ...gen.kernel import Kernel
from ...gen.render import render
from ...gen.variant import Variant
from ..cards.device import Device
from ..cards.slug import device_slug
from ..errors import FlashgenError
from ..evaluate.outcome import Measurement, Outcome, TunedKernel
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
    assert winner.measurement is not None
    rendered = render(winner.variant, options.problem, options.limits)
    kernel = tuned_kernel(
        options.device, rendered, winner.measurement, toolkit=toolkit, seed=options.seed, tuned_at=tuned_at
    )
    slug = device_slug(options.device)
    paths = library.Paths.of(options.out, slug, kernel.problem.name)
    faster = faster_in_library(paths.json, kernel, options.families, narrowed=bool(options.held))
    with contextlib.ExitStack() as stack:
        if faster is None:
            stack.callback(write_files, options.out, slug, kernel, rendered)
        with storage_errors(options.storage):
            study.set_user_attr(TUNED, records.to_record(kernel))
    return Kept(kernel, slug, paths, faster)


def tuned_kernel(
    device: Device,
    rendered: Kernel,
    measurement: Measurement,
    *,
    toolkit: str,
    seed: int = 0,
    tuned_at: str | None = None,
) -> TunedKernel:
    """Returns the record of a kernel that won on a device; ``tuned_at`` is now unless told otherwise."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return TunedKernel(
        problem=rendered.problem,
        variant=rendered.variant,
        source=rendered.source,
        measurement=measurement,
        device=device.limits.name,
        arch=device.limits.arch,
        driver=device.driver,
        toolkit=toolkit,
        flashgen=flashgen_version(),
        seed=seed,
        tuned_at=tuned_at or now,
    )


def write_files(folder: Path, slug: str, kernel: TunedKernel, rendered: Kernel) -> library.Paths:
    """Writes a winner's files into a library's folder, with its figures in the texts.

    Raises:
        FlashgenError: the folder cannot be written.
    """
    told = {"device": kernel.device, "measurement": records.figures(kernel)}
    cuda, module = emit_cuda(rendered, **told), emit_thin_module(rendered, **told)
    return library.write(folder, slug, kernel, cuda=cuda, module=module)


def faster_in_library(
    path: Path, kernel: TunedKernel, families: Collection[type[Variant]], *, narrowed: bool
) -> Path | None:
    """Returns the library's file where that kernel is faster and must not be replaced: where the search was
    ``narrowed``, by parameters held say, or looked at no kernels of its family."""
    if not path.exists():
        return None
    with contextlib.suppress(FlashgenError):
        known = library.read(path).kernel
        narrowed = narrowed or type(known.variant) not in families
        faster = known.measurement.median_us < kernel.measurement.median_us
        # An interrupted run leaves the figures of one trial; timed again, the same variant has others.
        if narrowed and faster and known.variant != kernel.variant:
            return path
    return None
