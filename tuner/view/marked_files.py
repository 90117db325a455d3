"""Markdown files of which parts, between markers, are generated: read with a part found, and written."""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import FlashgenError
from ..files import read_text, write_text


def read_marked(path: Path, section: re.Pattern[str], markers: str) -> str:
    """Returns the text of a Markdown file with a ``section``, between ``markers`` as a message shows them.

    Raises:
        FlashgenError: the file cannot be read, or has nothing to fill.
    """
    try:
        text = read_text(path)
    except OSError as error:
        raise FlashgenError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise FlashgenError(f"{path} cannot be read: it is no text") from error
    if section.search(text) is None:
        raise FlashgenError(f"{path} has no `{markers}` to fill")
    return text


def write_filled(path: Path, text: str) -> None:
    """Writes a file whose parts are filled. Raises FlashgenError where it cannot be written."""
    try:
        write_text(path, text)
    except OSError as error:
        raise FlashgenError(
            f"{path} cannot be written: {error.strerror or error}; free some space or mend its permissions"
        ) from error
