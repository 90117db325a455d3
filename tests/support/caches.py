"""Caches of built kernels that tests have to themselves."""

from __future__ import annotations

import os
import shutil
from functools import cache
from pathlib import Path

from flashgen.gen.limits import preset
from flashgen.tuner.build.cache import cache_folder
from flashgen.tuner.cards.emulated import SimDevice


def without_kernels(folder: Path) -> Path:
    """Returns a cache in that folder which holds what all kernels of emulated cards share, and no kernel.

    To compile that takes as long as a dozen small kernels do; it is the same for all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in _shared(cache_folder()) if shutil.which("g++") or shutil.which("clang++") else ():
        place = folder / path.parent.name / path.name
        place.parent.mkdir(exist_ok=True)
        if path.stat().st_dev == folder.stat().st_dev:
            os.link(path, place)
        else:
            shutil.copy2(path, place)
    return folder


@cache
def _shared(folder: Path) -> list[Path]:
    artifacts = SimDevice("emulated", preset("gtx-1080")).toolchain().shared()
    return [path for artifact in artifacts for path in (artifact, artifact.with_suffix(".json"))]
