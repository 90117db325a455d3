"""What becomes of processes."""

import contextlib
import time
from pathlib import Path


def gone(pid: int) -> bool:
    """Whether the process ends soon; one that nobody waited for has."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def descendants(pid: int) -> list[int]:
    """The children of a process, and theirs."""
    found = []
    for child in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for each in map(int, child.read_text().split()):
                found += [each, *descendants(each)]
    return found
