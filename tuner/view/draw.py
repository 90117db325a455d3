"""A problem's mask and change of scores, drawn: read from options, shown on a terminal, written as SVG."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ...gen.emit.words import mask_words
from ...gen.problem import Problem
from ...gen.scoring.scores import Buffer, laid_over
from ..errors import FlashgenError, UsageError
from ..files import open_regular, write_text
from .mask_picture import svg, terminal_picture
from .picture_values import picture_values
from .score_matrix import TILE, ScoreMatrix, score_matrix


@dataclass(frozen=True)
class Drawing:
    """A problem and its matrix."""

    problem: Problem
    matrix: ScoreMatrix

    @property
    def title(self) -> str:
        """What is drawn, in words."""
        lengths = f"{self.problem.seqlen_q} rows, {self.problem.seqlen_k} keys"
        return f"{mask_words(self.problem).removeprefix('with ')}: {lengths}"

    def write(self, path: Path) -> None:
        """Writes the picture as SVG. Raises FlashgenError where it cannot be written."""
        try:
            write_text(path, svg(self.matrix, self.title))
        except OSError as error:
            raise FlashgenError(
                f"{path} cannot be written: {error.strerror or error}; name another file"
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """Returns what is drawn as JSON has it."""
        return {"problem": self.problem.to_dict(), **self.matrix.to_dict()}


def drawing(problem: Problem, *, of: str = "0,0", values: Path | None = None) -> Drawing:
    """Returns what is drawn for a batch and a query head, ``of`` as typed, by the arrays in a file or typical
    ones. Raises UsageError for what there is not, FlashgenError for a file that cannot be read."""
    batch, head = _parse_place(problem, of)
    known = picture_values(problem)
    if values is not None:
        known = laid_over(known, _read_values(problem, values))
    return Drawing(problem, score_matrix(problem, known, batch=batch, head=head))


def show_drawing(console: Console, drawing: Drawing) -> None:
    """Prints the picture and the shares of pairs and tiles."""
    matrix = drawing.matrix

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    say(drawing.title)
    for line in terminal_picture(matrix, console):
        console.print(line, highlight=False, soft_wrap=True)
    if matrix.cell_rows * matrix.cell_keys > 1:
        say(f"a cell is {_count(matrix.cell_rows, 'row')} by {_count(matrix.cell_keys, 'key')}")
    about = "about " if matrix.is_sampled else ""
    say(
        f"visible are {about}{matrix.visible_share:.1%} of the pairs; skipped are "
        f"{about}{matrix.skipped_share:.1%} of the tiles of {TILE} x {TILE}"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number > 1)}"


def _parse_place(problem: Problem, text: str) -> tuple[int, int]:
    try:
        batch, head = (int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--of {text!r} is no batch and head, as in --of 0,3") from None
    for what, number, count in (("batch", batch, problem.batch), ("query head", head, problem.num_q_heads)):
        if not 0 <= number < count:
            raise UsageError(f"--of names {what} {number}, but they are 0 to {count - 1}")
    return batch, head


def _read_values(problem: Problem, path: Path) -> dict[str, Any]:
    """The arrays of a file that the problem reads."""
    try:
        with open_regular(path) as file, np.load(file, allow_pickle=False) as arrays:
            read = {name: arrays[name] for name in arrays.files}
    except OSError as error:
        raise FlashgenError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        raise FlashgenError(f"{path} holds no arrays by name, as numpy.savez writes them") from error
    buffers = {each.name: each for each in problem.scores.buffers}
    if unknown := sorted(read.keys() - buffers.keys()):
        named = ", ".join(buffers) or "none"
        raise UsageError(f"{path} holds {unknown[0]!r}, which the mask does not read; it reads {named}")
    for name, array in read.items():
        _check_array(buffers[name], array, problem)
    return read


def _check_array(buffer: Buffer, array: np.ndarray, problem: Problem) -> None:
    if array.dtype.kind not in "buif":
        raise UsageError(f"{buffer.name} is of {array.dtype}; numbers or truths are read")
    if array.ndim != len(buffer.axes):
        raise UsageError(f"{buffer.name} has {array.ndim} axes; it is read with {len(buffer.axes)} indices")
    for axis, (names, length) in enumerate(zip(buffer.axes, array.shape, strict=True)):
        least = max((getattr(problem, name) for name in names), default=1)
        if length < least:
            raise UsageError(f"axis {axis} of {buffer.name} is {length} long; indices go up to {least - 1}")
