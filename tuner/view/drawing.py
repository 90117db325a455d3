"""What plots are drawn with, which need not be installed."""

from __future__ import annotations

import importlib.util

from ..errors import FlashgenError


def require_matplotlib() -> None:
    """Raises FlashgenError, with how to get it, where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise FlashgenError(
            "plots are drawn by matplotlib, which is not installed: `pip install matplotlib`, or "
            "`pip install -e '.[plots]'` in a checkout of flashgen"
        )
