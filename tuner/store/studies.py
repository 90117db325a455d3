"""Where trials are kept: one Optuna study per card, problem, family and version of what makes the kernels.

Nothing else stores trials. A trial's parameters are the variant it tried; its user attribute ``outcome`` is
the `Outcome` whole.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import re
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
from optuna.distributions import CategoricalDistribution
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import event
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from ...gen.variant import Variant
from ..errors import FlashgenError
from ..evaluate.outcome import Measurement, Outcome, Status
from ..extras import getting
from ..files import check_regular
from .database import UNREADABLE, Database
from .journal import Journal, NoJournal
from .liveness import OWNER, is_dead
from .places import DEFAULT_FILE, without_password

OUTCOME = "outcome"
#: What a trial's value is.
OBJECTIVE = "median_us"
#: Compiler output kept with a failed trial; some databases bound a text's length.
MAX_REASON = 1500
#: How long a writer waits for another's lock.
LOCK_SECONDS = 30
#: Optuna's gRPC proxy, and how long it may take to answer at first.
PROXY, PROXY_SECONDS = "grpc://", 10.0
#: Drivers by database, the best first: SQLAlchemy's name and the module. Which one it takes where a URL names
#: none depends on its version.
DRIVERS = {
    "postgresql": {"psycopg": "psycopg", "psycopg2": "psycopg2", "pg8000": "pg8000"},
    "mysql": {"pymysql": "pymysql", "mysqldb": "MySQLdb", "mysqlconnector": "mysql.connector"},
}
#: The table in which Optuna keeps its studies, and those in which its tables' version is kept.
STUDIES, VERSIONS = "studies", frozenset({"version_info", "alembic_version"})

_log = logging.getLogger(__name__)


class NotOurs(FlashgenError):
    """A file or a database that holds something else than our trials."""


@contextlib.contextmanager
def storage_errors(where: str) -> Iterator[None]:
    """Turns what a storage raises while it is used into one message with the way out."""
    try:
        yield
    except (NoSuchModuleError, ArgumentError) as error:
        raise _no_storage(where, str(error)) from error
    except (SQLAlchemyError, sqlite3.Error, optuna.exceptions.StorageInternalError) as error:
        raise _unusable(where, _root(error)) from error
    except OSError as error:
        # Of a journal; whoever else opens files says so himself.
        if error.filename is None or not str(error.filename).startswith(where):
            raise
        raise _unusable(where, error.strerror or str(error)) from error
    except Exception as error:
        # Of the proxy; its module is imported by nobody else.
        if not any(kind.__name__ == "RpcError" for kind in type(error).__mro__):
            raise
        raise _unusable(where, getattr(error, "details", lambda: "")() or str(error)) from error


@contextlib.contextmanager
def _opening_errors(where: str) -> Iterator[None]:
    """The same while it is opened, which may fail in more ways."""
    try:
        with storage_errors(where):
            yield
    except OSError as error:
        raise _unusable(where, error.strerror or str(error)) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise _unusable(where, "it is no journal of Optuna's") from error
    except NotOurs as error:
        raise _unusable(where, str(error)) from error
    except ImportError as error:
        raise _no_storage(where, _driver(error)) from error
    except (ValueError, optuna.exceptions.OptunaError) as error:
        raise _no_storage(where, str(error)) from error
    except RuntimeError as error:
        # Of tables that another version of Optuna made; it says which, and how to convert them.
        raise _unusable(where, str(error)) from error


def _no_storage(where: str, why: str) -> FlashgenError:
    return FlashgenError(
        f"cannot open the storage {without_password(where)}: {why}; pass --storage a file name "
        "(trials.sqlite3, trials.journal) or a database URL whose driver is installed"
    )


def _unusable(where: str, why: str) -> FlashgenError:
    first_line = why.strip().splitlines()[0] if why.strip() else "unknown error"
    return FlashgenError(
        f"the trials cannot be kept in {without_password(where)}: {first_line}; name another place with "
        "--storage, or mend this one (space, permissions) and repeat the command: it resumes"
    )


def _root(error: Exception) -> str:
    """What the database itself said: the innermost cause, without SQLAlchemy's and Optuna's wrapping."""
    while error.__cause__ is not None and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return str(getattr(error, "orig", None) or error)


def _driver(error: ImportError) -> str:
    """Which module a database URL's driver lacks; Optuna's own message does not say."""
    cause = error.__cause__
    missing = (cause.name if isinstance(cause, ImportError) else None) or error.name
    return f"its driver, the Python module {missing}, is not installed" if missing else str(error)


def open_storage(where: str) -> BaseStorage:
    """Opens the storage ``where`` names: a database's URL, Optuna's gRPC proxy (``grpc://host:port``), a
    ``.journal`` or ``.log`` file, or an SQLite file.

    Raises:
        FlashgenError: it cannot be opened or written.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with _opening_errors(where), warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if where.endswith((".journal", ".log")):
            Path(where).parent.mkdir(parents=True, exist_ok=True)
            return _open_journal(Path(where))
        if where.startswith(PROXY):
            return _open_proxy(where)
        if "://" in where and not where.startswith("sqlite"):
            # A connection that the server dropped while a kernel was timed is made anew.
            return _open_database(_with_driver(where), {"pool_pre_ping": True})
        if where.endswith(("://", ":memory:")):
            raise ValueError("nothing would be kept")
        path = Path(where.split(":///", 1)[-1])
        if path.is_dir():
            raise IsADirectoryError(f"it is a folder; name a file in it, as in {path / DEFAULT_FILE}")
        path.parent.mkdir(parents=True, exist_ok=True)
        check_regular(path)
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError("it is not writable")
        return _open_sqlite(where if "://" in where else f"sqlite:///{path}")


def _open_journal(path: Path) -> JournalStorage:
    try:
        return JournalStorage(Journal(path))
    except NoJournal as error:
        raise NotOurs(str(error)) from error
    except UNREADABLE as error:
        raise NotOurs(
            f"a line of it is nothing that Optuna writes ({type(error).__name__}: {error})"
        ) from error


def _open_sqlite(url: str) -> RDBStorage:
    return _open_database(url, {"connect_args": {"timeout": LOCK_SECONDS}}, _write_ahead)


def _open_database(
    url: str, engine: dict[str, Any], prepare: Callable[[RDBStorage], None] = lambda storage: None
) -> RDBStorage:
    """Two runs that make the same new tables at once stand in each other's way: the later one tries again."""
    for patience in (0.2, 0.5, 1.0, 2.0, None):
        try:
            require_ours(url, engine)
            storage = Database(url, engine_kwargs=engine)
            _make_missing_indexes(storage)
            prepare(storage)
            return storage
        except SQLAlchemyError as error:
            if patience is None or not re.search("already exists|locked|UNIQUE|uplicate", str(error)):
                raise
            time.sleep(patience)
    raise AssertionError("unreachable")


def require_ours(url: str, engine: Mapping[str, Any]) -> None:
    """Raises NotOurs for a database that holds the tables of another program and none of Optuna's: it gets no
    tables of ours."""
    made = sqlalchemy.create_engine(url, **engine)
    try:
        found = sqlalchemy.inspect(made)
        names = set(found.get_table_names())
        has_studies = STUDIES in names and "study_name" in {c["name"] for c in found.get_columns(STUDIES)}
    finally:
        made.dispose()
    # A run killed while it made the tables leaves those of the version alone, or that of the studies too:
    # all others refer to it.
    others = sorted(names - VERSIONS)
    if others and not has_studies:
        raise NotOurs(f"it is the database of another program, with the tables {', '.join(others[:4])}")


def _make_missing_indexes(storage: RDBStorage) -> None:
    """SQLite makes a table and its indexes one after the other. A run killed in between leaves out, for good,
    the one that forbids two studies of one name."""
    from optuna.storages._rdb.models import BaseModel

    for table in BaseModel.metadata.sorted_tables:
        for index in table.indexes:
            index.create(storage.engine, checkfirst=True)


def _with_driver(url: str) -> str:
    """The URL with a driver that is installed, where it names none. Raises ImportError when there is none."""
    scheme, _, rest = url.partition("://")
    dialect = {"postgres": "postgresql"}.get(scheme, scheme)
    if dialect not in DRIVERS:
        return url
    for name, module in DRIVERS[dialect].items():
        if _installed(module):
            return f"{dialect}+{name}://{rest}"
    first = next(iter(DRIVERS[dialect].values()))
    raise ImportError(f"no module {first}", name=f"{first} ({getting(dialect)})")


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _open_proxy(where: str) -> BaseStorage:
    """Optuna's proxy, which stands between many hosts and one database."""
    if not _installed("grpc"):
        raise ImportError("no module grpc", name=f"grpc ({getting('grpc')})")
    from optuna.storages import GrpcStorageProxy

    host, _, port = where.removeprefix(PROXY).rstrip("/").partition(":")
    if not host or not port.isdigit():
        raise ValueError("a proxy is named by host and port, as in grpc://tuning-host:13000")
    proxy = GrpcStorageProxy(host=host, port=int(port))
    proxy.wait_server_ready(timeout=PROXY_SECONDS)
    return proxy


def _write_ahead(storage: RDBStorage) -> None:
    """A killed run loses nothing under a write-ahead log, and a trial's dozen commits wait for no fsync."""

    @event.listens_for(storage.engine, "connect")
    def _configure(connection: Any, _record: Any) -> None:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")

    storage.engine.dispose()
    with storage.engine.connect():
        pass


def open_study(storage: BaseStorage, where: str, name: str, about: Mapping[str, Any]) -> Study:
    """Opens the study ``name``, created with ``about`` as its user attributes where it is new.

    Trials that a killed run left RUNNING become FAIL, so that their variants are tried again.
    """
    with _opening_errors(where):
        study = optuna.create_study(
            storage=storage, study_name=name, direction="minimize", load_if_exists=True
        )
        _name_objective(study)
        for key, value in about.items():
            if study.user_attrs.get(key) != value:
                study.set_user_attr(key, value)
        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING, TrialState.WAITING)):
            # Those of other hosts are watched while the search goes on.
            if _abandoned(trial):
                with contextlib.suppress(ValueError, optuna.exceptions.UpdateFinishedTrialError):
                    study.tell(trial.number, state=TrialState.FAIL)
    return study


def distributions(family: type[Variant]) -> dict[str, CategoricalDistribution]:
    """Returns one categorical distribution per parameter, the same whatever is held by ``--set``."""
    return {p.name: CategoricalDistribution(p.choices) for p in family.parameters()}


def _name_objective(study: Study) -> None:
    """So that plots say what they show."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if study.metric_names != [OBJECTIVE]:
            study.set_metric_names([OBJECTIVE])


def _abandoned(trial: FrozenTrial) -> bool:
    """Whether nobody runs that trial for sure: its run is over, or it waits for one that never was."""
    name = str(trial.user_attrs.get(OWNER, ""))
    return is_dead(name) or (not name and trial.state is TrialState.WAITING)


def outcome_to_dict(outcome: Outcome) -> dict[str, Any]:
    return {
        "variant": outcome.variant.to_dict(),
        "status": str(outcome.status),
        "reason": outcome.reason[:MAX_REASON],
        "measurement": outcome.measurement.to_dict() if outcome.measurement else None,
        "seconds": outcome.seconds,
    }


def plain_figures(outcome: Outcome) -> dict[str, str | float]:
    """Returns what of an outcome Optuna's dashboard can plot and filter by: one user attribute each."""
    measured = outcome.measurement
    if measured is None:
        return {"status": str(outcome.status)}
    figures = {name: getattr(measured, name) for name in ("tflops", "registers", "occupancy", "error")}
    return {"status": str(outcome.status), **figures}


def outcome_from_dict(family: type[Variant], data: Mapping[str, Any]) -> Outcome:
    measurement = data["measurement"]
    return Outcome(
        variant=family.from_dict(data["variant"]),
        status=Status(data["status"]),
        reason=str(data["reason"]),
        measurement=Measurement.from_dict(measurement) if measurement else None,
        seconds=dict(data["seconds"]),
    )


def outcomes(study: Study, family: type[Variant]) -> list[tuple[FrozenTrial, Outcome]]:
    """Returns every finished trial of the study with its outcome, oldest first. Those that cannot be read are
    passed over, and counted in the log."""
    found, unread = [], []
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)):
        if OUTCOME in trial.user_attrs:
            outcome = outcome_of(trial, family)
            found.append((trial, outcome)) if outcome is not None else unread.append(trial.number)
    log_unread(study.study_name, len(found), unread)
    return found


def log_unread(study: str, read: int, unread: Sequence[int]) -> None:
    """Writes to the log how many of a study's trials could not be read, if any."""
    if unread:
        told = f"{len(unread)} of {read + len(unread)} trials of {study}"
        _log.warning("passed over: %s cannot be read, the first of them trial %d", told, unread[0])


def outcome_of(trial: FrozenTrial, family: type[Variant]) -> Outcome | None:
    """Returns what became of a finished trial, None where that cannot be read."""
    try:
        return outcome_from_dict(family, trial.user_attrs[OUTCOME])
    except UNREADABLE:
        return None
