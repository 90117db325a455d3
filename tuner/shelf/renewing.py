"""Writing the files of kernels that were tuned before anew, from their records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ...gen.emit.cuda import emit_cuda
from ...gen.emit.module import emit_thin_module
from ...gen.render import render
from ...gen.variant import Illegal
from ..errors import FlashgenError, UsageError
from ..files import write_text
from . import library
from .emitting import limits_of
from .records import figures


def renew(folder: Path) -> Iterator[library.Entry]:
    """Renders each kernel that has a record in the folder, ``out/nvidia_h200``, as this flashgen does, and
    writes its .cu and .py files; what was measured stays.

    Raises:
        UsageError: there is no record in the folder.
        FlashgenError: a record cannot be read, its kernel is not legal any more, or a file cannot be written.
    """
    records = sorted(folder.glob("*.json"))
    if not records:
        raise UsageError(f"{folder} has no record of a tuned kernel; name a card's folder: out/nvidia_h200")
    for path in records:
        entry = library.read(path)
        tuned, limits = entry.kernel, limits_of(entry)
        try:
            kernel = render(tuned.variant, tuned.problem, limits)
        except Illegal as error:
            raise FlashgenError(
                f"{path} holds a variant that is not legal any more ({error}); remove it, or tune again"
            ) from error
        told = {"device": tuned.device, "measurement": figures(tuned)}
        try:
            write_text(path.with_suffix(".cu"), emit_cuda(kernel, **told))
            write_text(path.with_suffix(".py"), emit_thin_module(kernel, **told))
        except OSError as error:
            raise FlashgenError(f"{folder} cannot be written: {error.strerror or error}") from error
        yield entry
