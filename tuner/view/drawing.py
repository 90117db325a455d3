"""What plots are drawn with, which need not be installed."""

from __future__ import annotations

import importlib.util

from ..errors import FlashgenError
from ..extras import getting


def require_matplotlib() -> None:
    """Raises FlashgenError, with how to get it, where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise FlashgenError(f"plots are drawn by matplotlib, which is not installed: {getting('plots')}")
