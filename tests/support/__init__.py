"""What several tests share; its scripts run in processes of their own, as `python -m tests.support.NAME`."""

from pathlib import Path

#: Where a process finds `tests` that runs in it.
ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
