"""What flashgen can do with packages that it is not installed with, and how to get them."""

from __future__ import annotations

#: By extra, as pyproject.toml calls it, what pip calls the packages.
PACKAGES = {
    "cuda": "pycuda",
    "postgresql": "'psycopg[binary]'",
    "mysql": "pymysql",
    "grpc": "grpcio protobuf",
    "plots": "matplotlib",
    "forest": "scikit-learn",
}


def getting(extra: str) -> str:
    """Returns the commands that install an extra, beside an installed flashgen and in a checkout."""
    return f"`pip install {PACKAGES[extra]}`, or `pip install -e '.[{extra}]'` in a checkout of flashgen"
