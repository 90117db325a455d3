"""What was compiled before, kept in the user's cache folder, which `flashgen cache` shows and clears."""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path


def _kept(parts: Sequence[str], produce: Callable[[], bytes]) -> bytes:
    """The binary of all that determines it, from the cache folder, else made now and kept there. A folder
    that cannot be written is done without."""
    key = hashlib.sha256("".join(f"{len(part)}:{part}" for part in parts).encode()).hexdigest()
    binary, record = (_cache_folder() / key[:2] / f"{key}{suffix}" for suffix in (".cubin", ".json"))
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content = binary.read_bytes()
        # What a crash or a full disk left incomplete is made again.
        if json.loads(record.read_text())["sha256"] == hashlib.sha256(content).hexdigest():
            os.utime(record)  # the least recently used go first
            return content
    content = produce()
    told = {"sha256": hashlib.sha256(content).hexdigest(), "metadata": {}}
    with contextlib.suppress(OSError):
        binary.parent.mkdir(parents=True, exist_ok=True)
        _write_whole(binary, content)
        _write_whole(record, json.dumps(told).encode())
    return content


def _cache_folder() -> Path:
    """`$FLASHGEN_CACHE`, else flashgen's folder among the user's caches."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("FLASHGEN_CACHE") or Path(caches, "flashgen")).expanduser().absolute()


def _write_whole(path: Path, content: bytes) -> None:
    """Other processes see the old file, none or the whole new one."""
    descriptor, scratch = tempfile.mkstemp(dir=path.parent, prefix=".scratch-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(scratch).replace(path)
    except OSError:
        Path(scratch).unlink(missing_ok=True)
        raise
