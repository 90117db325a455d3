"""The example that draws the pictures of docs/masks.md, and what the page shows of each."""

from __future__ import annotations

import inspect
import runpy
from functools import cache
from typing import Any

from . import ROOT

PICTURES = ROOT / "docs" / "masks"
EXAMPLE = ROOT / "docs" / "examples" / "masks.py"


@cache
def example() -> dict[str, Any]:
    """Returns the names of the example's module."""
    return runpy.run_path(str(EXAMPLE))


@cache
def pictures() -> dict[str, Any]:
    """Returns what is drawn, by the names of the files."""
    return example()["pictures"]()


def section(name: str) -> str:
    """Returns what the page shows of a picture: itself, the function, how it is tuned for and called."""
    picture = pictures()[name]
    function = picture.function
    source = f"{inspect.getsource(function).strip()}\n\n\n" if function else ""
    title = picture.drawing().title.partition(":")[0] if function is None else function.__name__
    return "\n".join(
        [
            f"![{title.replace('_', ' ')}](masks/{name}.svg)",
            "",
            f"    {picture.command}",
            "",
            f"```python\n{source}{picture.call}\n```",
        ]
    )
