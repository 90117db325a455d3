"""The identity of a family, found out once for each state of the sources that it follows from.

Eighty kernels are rendered for it, which takes seconds, and every search begins with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...gen import identity
from ...gen.render import TEMPLATES
from ..build.cache import cached
from ..errors import FlashgenError

#: What identities follow from: templates, what renders them, and the sample.
_SOURCES = ((TEMPLATES, "*.jinja"), (TEMPLATES.parent / "gen", "*.py"), (TEMPLATES.parent / "gen", "*.json"))


def kept_identity(name: str) -> str:
    """Returns today's identity of the family of that name, by the cache where it has been found out before.

    Raises LookupError for a family that has no sample.
    """

    def produce(path: Path) -> Mapping[str, Any]:
        found = identity.identity(name)
        path.write_text(found, encoding="utf-8")
        return {"identity": found}

    try:
        return cached(("identity", name, _digest_of_sources()), ".txt", produce).metadata["identity"]
    except FlashgenError:  # nothing can be kept
        return identity.identity(name)


@cache
def _digest_of_sources() -> str:
    digest = hashlib.sha256(version("jinja2").encode())
    for folder, pattern in _SOURCES:
        for path in sorted(folder.rglob(pattern)):
            digest.update(f"\0{path.relative_to(folder.parent)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
