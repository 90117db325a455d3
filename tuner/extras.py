"""What flashgen can do with packages that it is not installed with, and how to get them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from .errors import FlashgenError

#: By extra, as pyproject.toml calls it, what pip calls the packages.
PACKAGES = {
    "tune": "nvidia-ml-py optuna pygments scipy sqlalchemy threadpoolctl",
    "cuda": "pycuda",
    "postgresql": "'psycopg[binary]'",
    "mysql": "pymysql",
    "grpc": "grpcio protobuf",
    "plots": "matplotlib",
    "forest": "scikit-learn",
}
#: The modules of the extra for tuning that nothing else brings.
TUNING_MODULES = frozenset({"optuna", "pynvml", "scipy", "sqlalchemy", "threadpoolctl"})


def getting(extra: str) -> str:
    """Returns the commands that install an extra, beside an installed flashgen and in a checkout."""
    return f"`pip install {PACKAGES[extra]}`, or `pip install -e '.[{extra}]'` in a checkout of flashgen"


@contextlib.contextmanager
def needing(what: str) -> Iterator[None]:
    """Turns an import that fails for want of the extra for tuning into a FlashgenError, which says how to get
    it; ``what`` needs the extra begins the message."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in TUNING_MODULES:
            raise
        raise FlashgenError(f"{what} needs {module}, which is not installed: {getting('tune')}") from error
