"""Files of trials that other tuners read: written by an export, read back by an import.

A file is data from anywhere. Nothing in it is compiled, evaluated or used as a path: parameters are looked up
among the family's choices, figures must be numbers in their range, names must match a narrow pattern, and
what can be worked out (medians, the name of the study, the kernel's source) is worked out anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import FlashgenError
from ..files import read_text, write_bytes
from .checked_values import CONTROL, Wrong, json_object, refuse_constant
from .kernel_tuner_cache import from_cache, to_cache
from .portable import Trials
from .t4_results import from_results, to_results

#: The formats that `export` writes and `read` reads.
KERNEL_TUNER, T4 = FORMATS = ("kernel-tuner", "t4")
#: The largest file that is read.
MAX_FILE_BYTES = 256 * 2**20


class BadFile(FlashgenError):
    """A file that cannot be imported."""


def export(path: Path, trials: Trials, style: str) -> None:
    """Writes a study's trials in the format ``style``, whole or not at all. Raises FlashgenError."""
    text = encoded(trials, style)
    try:
        write_bytes(path, text)
    except OSError as error:
        raise FlashgenError(
            f"{path} cannot be written: {error.strerror or error}; free some space or name another file"
        ) from error


def encoded(trials: Trials, style: str) -> bytearray:
    """Returns a study's trials as JSON in the format ``style``.

    A trial is a line, as Kernel Tuner writes them itself: with one for every number a file of 20,000 trials
    takes ten times as long.
    """
    is_object = style == KERNEL_TUNER
    document = to_cache(trials) if is_object else to_results(trials)
    encode = json.JSONEncoder(allow_nan=False).encode
    opening, closing = "{}" if is_object else "[]"
    text = bytearray(b"{\n")
    for name, value in document.head.items():
        text += f"{encode(name)}: {encode(value)},\n".encode()
    text += f"{encode(document.name)}: {opening}".encode()
    for number, (key, entry) in enumerate(document.entries):
        label = f"{encode(key)}: " if is_object else ""
        text += f"{',' if number else ''}\n{label}{encode(entry)}".encode()
    # Kernel Tuner takes a file that does not end in two braces, each on its own, for one cut short.
    text += f"\n{closing}\n}}\n".encode()
    return text


def read(path: Path) -> Trials:
    """Reads the trials of a file that `export` wrote, in either format, with everything in it checked.

    Raises:
        BadFile: it cannot be read, or something in it is not as it must be; the message says where.
    """
    try:
        text = read_text(path, MAX_FILE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise BadFile(f"{path} cannot be read: {why}; name a file that `flashgen export` wrote") from error
    try:
        document = json.loads(text, parse_constant=refuse_constant)
        return from_document(document)
    except (Wrong, ValueError, RecursionError) as error:
        why = CONTROL.sub(" ", str(error))[:400] if isinstance(error, Wrong | ValueError) else "too deep"
        raise BadFile(f"{path} cannot be imported: {why}; export it again with `flashgen export`") from error


def from_document(document: Any) -> Trials:
    """Reads the trials of a parsed file, of a variant the last one alone. Raises ValueError."""
    top = json_object(document, "the file")
    if "cache" in top:
        about, ended = from_cache(top)
    elif "results" in top:
        about, ended = from_results(top)
    else:
        raise Wrong("it holds neither a Kernel Tuner cache nor T4 results")
    unique = {each.outcome.variant: each for each in sorted(ended, key=lambda each: each.at, reverse=True)}
    return Trials(about, tuple(sorted(unique.values(), key=lambda each: each.at)))
