"""The installed version of flashgen."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def flashgen_version() -> str:
    try:
        return version("flashgen")
    except PackageNotFoundError:
        return "unknown"
