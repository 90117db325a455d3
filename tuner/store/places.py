"""Where trials are kept, by name: what is asked before anything opens a storage."""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import FlashgenError

#: The file in the out folder that holds the studies by default.
DEFAULT_FILE = "tuning.sqlite3"


def default_storage(out: Path) -> str:
    """Returns the storage of an out folder, where none is named."""
    return str(out / DEFAULT_FILE)


def require_existing(where: str) -> None:
    """Raises FlashgenError for a file that is not there: opening it would make an empty one."""
    if "://" not in where and not Path(where).exists():
        raise FlashgenError(f"the storage {where} does not exist; name one that `flashgen tune` wrote")


def without_password(where: str) -> str:
    """Returns a storage's name as it may be shown."""
    return re.sub(r"(://[^:/@]*):[^@/]*@", r"\1:***@", where)
