"""A score matrix as a picture: as an SVG that is the same to the byte each time, and for the terminal.

What is visible and left as it is has one colour. Less of it, where something is taken away from scores or
not all of a cell is visible, fades towards the ground; more turns to another colour.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import accumulate

import numpy as np
from rich.console import Console
from rich.text import Text

from .score_matrix import ScoreMatrix

#: The strongest level either way.
STRONGEST = 4
#: How a level is told in a matrix that has no cell there.
HIDDEN = -99
#: Colours as red, green, blue on light and dark ground: the ground, hidden cells, visible ones, what is more,
#: sinks, and text.
_Colour = tuple[int, int, int]
_LIGHT: dict[str, _Colour] = {
    "ground": (255, 255, 255),
    "hidden": (238, 241, 245),
    "seen": (31, 78, 140),
    "more": (213, 94, 0),
    "sink": (0, 130, 100),
    "text": (68, 76, 86),
}
_DARK: dict[str, _Colour] = {
    "ground": (13, 17, 23),
    "hidden": (33, 38, 46),
    "seen": (108, 176, 245),
    "more": (255, 159, 64),
    "sink": (63, 200, 160),
    "text": (173, 186, 199),
}
#: How far the faintest level is from what is hidden towards what is visible.
_FAINTEST = 0.28
#: How far the least of what is more is from what is visible.
_LEAST_MORE = 0.25
#: A cell's side in the drawing, in pixels.
_CELL = 10


def levels(matrix: ScoreMatrix) -> np.ndarray:
    """Returns a level for each cell: 0 visible and unchanged, down to ``-STRONGEST`` with less of it, up to
    ``STRONGEST`` with more, `HIDDEN`."""
    if matrix.change is None:
        found = np.ceil(STRONGEST * matrix.seen) - STRONGEST
    else:
        told = matrix.change - matrix.is_factor
        most = _most(told)
        # Rounded first: what is a hair's breadth from a step is so on each machine.
        found = np.rint(np.round(STRONGEST * np.nan_to_num(told, nan=0.0) / (most or 1.0), 6))
    return np.where(matrix.seen > 0, found, HIDDEN).astype(int)


def _most(values: np.ndarray) -> float:
    """The largest of them either way."""
    known = np.abs(values[np.isfinite(values)])
    return float(known.max()) if known.size else 0.0


def legend(matrix: ScoreMatrix) -> list[tuple[int, str]]:
    """Returns levels and what they stand for, the least first; none where cells are visible or hidden."""
    present = sorted(set(levels(matrix).flat) - {HIDDEN})
    if matrix.change is None:
        words = {min(present, default=0): "some pairs", 0: "all pairs"}
        return [] if present in ([], [0]) else [each for each in words.items() if each[0] in present]
    most = _most(matrix.change - matrix.is_factor)
    told = []
    for level in sorted({min(present, default=0), 0, max(present, default=0)}):
        number = level / STRONGEST * most + matrix.is_factor
        told.append(
            (level, f"times {number:.2g}" if matrix.is_factor else f"{number:+.2g}" if level else "0")
        )
    return told


# -- SVG -----------------------------------------------------------------------------------------------------


def svg(matrix: ScoreMatrix, title: str) -> str:
    """Returns the picture as an SVG file, ``title`` for those who cannot see it. It follows the light or dark
    mode of who looks at it, on a ground of its own."""
    cells = levels(matrix)
    rows, keys = cells.shape
    told = legend(matrix)
    left, top = 20 + 16 * (matrix.sink is not None), 18
    places = list(accumulate((_word_width(words) for _, words in told), initial=left))
    width = max(left + keys * _CELL + 8, places[-1])
    height = top + rows * _CELL + 8 + 18 * bool(told)
    present = sorted(set(cells.flat) | {level for level, _ in told} | {HIDDEN})
    visible = [level for level in present if level in cells and level != HIDDEN]
    lines = [f"M{key} 0v{rows}" for key in range(1, keys)] + [f"M0 {row}h{keys}" for row in range(1, rows)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img">',
        f"<title>{escape(title)}</title>",
        _style(present, matrix.sink is not None),
        '<rect class="ground" width="100%" height="100%" rx="5"/>',
        f'<text x="{left}" y="12">keys</text>',
        f'<text transform="translate(13 {top + min(rows, 3) * _CELL})rotate(-90)">rows</text>',
        f'<g transform="translate({left} {top})scale({_CELL})">',
        f'<rect class="{_class(HIDDEN)}" width="{keys}" height="{rows}"/>',
        *(f'<path class="{_class(level)}" d="{_runs(cells == level)}"/>' for level in visible),
        f'<path class="lines" d="{"".join(lines)}"/></g>',
    ]
    if matrix.sink is not None:
        parts.append(f'<path class="sink" d="M{left - 9} {top}v{rows * _CELL}"/>')
    for (level, words), x in zip(told, places, strict=False):
        y = top + rows * _CELL + 15
        parts.append(f'<rect class="{_class(level)}" x="{x}" y="{y - 9}" width="10" height="10"/>')
        parts.append(f'<text x="{x + 14}" y="{y}">{escape(words)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _word_width(words: str) -> int:
    """The room that a word of the legend takes with its square, in pixels."""
    return 28 + 6 * len(words)


def _class(level: int) -> str:
    return "hidden" if level == HIDDEN else f"{'l' if level < 0 else 'm'}{abs(level)}"


def _runs(cells: np.ndarray) -> str:
    """Strokes from left to right over the cells that are true."""
    found = []
    for row, line in enumerate(cells):
        edges = np.flatnonzero(np.diff(np.concatenate([[False], line, [False]]).astype(int)))
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            found.append(f"M{start} {row + 0.5:g}h{end - start}")
    return "".join(found)


def _style(present: list[int], has_sink: bool) -> str:
    def rules(colours: dict[str, _Colour]) -> Iterator[str]:
        yield f".ground{{fill:{_hex(colours['ground'])}}}"
        yield f".lines{{stroke:{_hex(colours['ground'])}}}"
        yield f"text{{fill:{_hex(colours['text'])}}}"
        if has_sink:
            yield f".sink{{stroke:{_hex(colours['sink'])}}}"
        for level in present:
            colour = _hex(_colour(level, colours))
            yield f".{_class(level)}{{stroke:{colour};fill:{colour}}}"

    fixed = "path{stroke-width:1}rect{stroke-width:0}.lines{stroke-width:.08}.sink{stroke-width:10}"
    fixed += "text{font:10px sans-serif}"
    dark = "".join(rules(_DARK))
    return f"<style>{fixed}{''.join(rules(_LIGHT))}\n@media(prefers-color-scheme:dark){{{dark}}}</style>"


def _colour(level: int, colours: dict[str, _Colour]) -> _Colour:
    if level == HIDDEN:
        return colours["hidden"]
    if level < 0:
        return _between(colours["seen"], colours["hidden"], -level / STRONGEST * (1 - _FAINTEST))
    return _between(
        colours["seen"], colours["more"], level and _LEAST_MORE + level / STRONGEST * (1 - _LEAST_MORE)
    )


def _between(one: _Colour, other: _Colour, share: float) -> _Colour:
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(one, other, strict=True))
    return red, green, blue


def _hex(colour: _Colour) -> str:
    return "#" + "".join(f"{part:02x}" for part in colour)


# -- terminal ------------------------------------------------------------------------------------------------

#: Characters of what is hidden, and from the least level to the greatest; where only ASCII can be shown.
_SHADES, _ASCII = " ·░▒▓█", " .:+x#"


def terminal_picture(matrix: ScoreMatrix, console: Console) -> list[Text]:
    """Returns the picture in lines that fit the console: shades of characters, and where it has colours those
    of the levels as well."""
    cells = levels(matrix)
    keys = cells.shape[1]
    wide = 2 if 2 * keys + 6 <= console.width else 1
    ascii_only = console.options.ascii_only
    shades = _ASCII if ascii_only else _SHADES
    upright = "|" if ascii_only else "│"
    edges = ("+-+", "+-+") if ascii_only else ("┌─┐", "└─┘")
    present = [level for level in range(-STRONGEST, STRONGEST + 1) if level in cells]
    coloured = console.color_system is not None and matrix.change is not None
    top, bottom = (each[0] + each[1] * (wide * keys) + each[2] for each in edges)
    sink = "s " if matrix.sink is not None else ""
    lines = [Text(f"{' ' * len(sink)}{top}")]
    for row in cells:
        line = Text(f"{sink}{upright}")
        for level in row:
            line.append(_shade(int(level), present, shades) * wide, _terminal_style(int(level), coloured))
        lines.append(line.append(upright))
    lines.append(Text(f"{' ' * len(sink)}{bottom}"))
    if told := legend(matrix):
        line = Text()
        for level, words in told:
            line.append(_shade(level, present, shades) * 2, _terminal_style(level, coloured))
            line.append(f" {words}   ")
        line.rstrip()
        lines.append(line)
    return lines


def _shade(level: int, present: list[int], shades: str) -> str:
    if level == HIDDEN:
        return shades[0]
    least, most = min([*present, 0]), max([*present, 0])
    visible = shades[1:]
    return visible[round((level - least) / (most - least) * (len(visible) - 1)) if most > least else -1]


def _terminal_style(level: int, coloured: bool) -> str:
    return _hex(_colour(level, _DARK)) if coloured and level != HIDDEN else ""
