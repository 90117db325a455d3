"""Files, folders and databases as nobody should write them, and the commands that meet them."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
from flashgen.gen.problem import Problem
from flashgen.tuner.evaluate.outcome import Outcome, Status
from flashgen.tuner.exchange.portable import Ended, Trials, put
from flashgen.tuner.processes import process_name
from flashgen.tuner.shelf import library
from flashgen.tuner.store.about import About

from tests.support.tuned_kernels import H200, LADDER, tuned

#: Text that sets a terminal's title, clears it and turns it around.
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"
DEEP = "[" * 200_000 + "]" * 200_000
SMALL = Problem(batch=1, num_q_heads=2, num_kv_heads=2, seqlen_q=64, seqlen_k=64, head_dim=32)


def write_kernel(out: Path, slug: str = "nvidia_h200", **problem: Any) -> library.Paths:
    """A kernel of a library folder, with made-up figures."""
    kernel = tuned(Problem(**problem))
    return library.write(out, slug, kernel, cuda=kernel.source, module="X = 1\n")


def write_study(where: Path) -> str:
    """A study with three trials; returns its name."""
    kernel = tuned(SMALL)
    about = About(SMALL, H200, LADDER, False, "580", "nvcc 13.0.88", "0.1.0", 0, "0123abcd")
    outcomes = [
        Outcome(variant=LADDER(br=br, bc=bc), status=Status.OK, measurement=kernel.measurement)
        for br, bc in ((64, 16), (64, 32), (32, 32))
    ]
    import datetime

    noon = datetime.datetime(2026, 5, 1, 12, tzinfo=datetime.UTC)
    return put(str(where), Trials(about, tuple(Ended(outcome, noon) for outcome in outcomes))).study


@contextlib.contextmanager
def database(path: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        yield connection
        connection.commit()


def _record(change: Callable[[dict[str, Any]], Any]) -> Callable[[str], str]:
    def changed(text: str) -> str:
        data = json.loads(text)
        change(data)
        return json.dumps(data)

    return changed


def _set(path: str, value: Any) -> Callable[[str], str]:
    *parents, last = path.split(".")

    def change(data: dict[str, Any]) -> None:
        for name in parents:
            data = data[name]
        data[last] = value

    return _record(change)


#: What may be wrong with a kernel's record, by what changes its text.
BAD_RECORDS: dict[str, Callable[[str], str]] = {
    "nested deeply": lambda text: DEEP,
    "nested within": lambda text: text.replace('"busy": ""', f'"busy": {DEEP}'),
    "a word for a time": _set("measurement.median_us", "fast"),
    "no time": _set("measurement.median_us", None),
    "NaN": _set("measurement.median_us", float("nan")),
    "infinite": _set("measurement.median_us", float("inf")),
    "negative": _set("measurement.median_us", -1.0),
    "zero": _set("measurement.times_us", [0.0]),
    "a truth for a time": _set("measurement.median_us", True),
    "NaN among times": _set("measurement.times_us", [1.0, float("nan")]),
    "times of words": _set("measurement.times_us", ["a"]),
    "times that are none": _set("measurement.times_us", 5),
    "NaN throughput": _set("measurement.tflops", float("nan")),
    "no occupancy": _set("measurement.occupancy", None),
    "a list of registers": _set("measurement.registers", [1]),
    "a number for when": _set("tuned_at", 5),
    "no time for when": _set("tuned_at", "yesterday"),
    "lone surrogate": _set("device", "\ud800"),
    "escapes": _set("device", f"H200{ESCAPES}"),
    "two lines": _set("device", "H200\n#include <owned>"),
    "no device": _set("device", None),
    "a word for an architecture": _set("arch", "90"),
    "no such family": _set("family", "\x1b[2J"),
    "a family that is a list": _set("family", []),
    "a parameter that is none": _set("variant.br", "\ud800"),
    "a size of words": _set("problem.batch", "4"),
    "half a size": _set("problem.seqlen_q", 1.5),
    "sizes without end": _set("problem.seqlen_q", 2**70),
    "a measurement of numbers": _set("measurement", 5),
    "cut": lambda text: text[:100],
    "a number": lambda text: "5",
    "null": lambda text: "null",
    "empty": lambda text: "",
    "not UTF-8": lambda text: text.replace("NVIDIA", "\udcff\udcfe"),
    "many digits": lambda text: text.replace('"seed": 0', '"seed": ' + "9" * 10_000),
}


def damage(path: Path, change: Callable[[str], str]) -> None:
    text = change(path.read_text(encoding="utf-8"))
    path.write_bytes(text.encode("utf-8", "surrogateescape"))


#: What may be wrong with a journal, by its lines; the first are a whole study's.
BAD_JOURNALS: dict[str, Callable[[bytes], bytes]] = {
    "an operation that is none": lambda text: text + b'{"op_code": 99}\n',
    "a list": lambda text: text + b"[1,2,3]\n",
    "an operation without all": lambda text: text + b'{"op_code": 4}\n',
    "words for numbers": lambda text: text + b'{"op_code": "a", "worker_id": 1}\n',
    "nested deeply": lambda text: text + DEEP.encode() + b"\n",
    "null": lambda text: text + b"null\n",
    "no JSON": lambda text: text + b"hello\n" + text,
    "no UTF-8": lambda text: b"\xff\xfe\xfd\n" + text,
    "zeros": lambda text: bytes(1000),
    "of another program": lambda text: b"2026-01-01 12:00 started\n2026-01-01 12:01 no line break at the end",
}

#: What may be wrong with a database of ours, by statements.
BAD_DATABASES: dict[str, str] = {
    "a later version of the tables": "UPDATE alembic_version SET version_num = 'v99.0.0.a'",
    "an earlier version of the tables": "UPDATE alembic_version SET version_num = 'v2.4.0.a'",
    "a choice that is none": "UPDATE trial_params SET param_value = 9999",
    "a choice that is no number": "UPDATE trial_params SET param_value = 'x'",
    "no outcome": "UPDATE trial_user_attributes SET value_json = 'null' WHERE key = 'outcome'",
    "outcomes of lists": "UPDATE trial_user_attributes SET value_json = '[1]' WHERE key = 'outcome'",
    "outcomes nested deeply": f"UPDATE trial_user_attributes SET value_json = '{DEEP}' WHERE key = 'outcome'",
    "outcomes that are no JSON": "UPDATE trial_user_attributes SET value_json = '{' WHERE key = 'outcome'",
    "distributions that are none": "UPDATE trial_params SET distribution_json = '{}'",
    "a state that is none": "UPDATE trials SET state = 'LOST'",
    "attributes of numbers": "UPDATE study_user_attributes SET value_json = '5'",
    "attributes nested deeply": f"UPDATE study_user_attributes SET value_json = '{DEEP}'",
    "a folder above": "UPDATE study_user_attributes SET value_json = '\"../../x\"' WHERE key = 'slug'",
    "escapes": "UPDATE study_user_attributes SET value_json = '\"\\u001b[2J\"' WHERE key = 'device'",
    "a study's name of escapes": "UPDATE studies SET study_name = char(27) || '[2J'",
    "NaN": "UPDATE trial_user_attributes SET value_json = replace(value_json, '101.0', 'NaN')",
    "no trials": "DROP TABLE trials",
}


def foreign_database(path: Path, tables: str = "customers") -> None:
    """Another program's database."""
    with database(path) as made:
        for name in tables.split():
            made.execute(f"CREATE TABLE {name} (id INTEGER PRIMARY KEY, what TEXT)")
            made.execute(f"INSERT INTO {name} VALUES (1, 'theirs')")


def dead_process() -> str:
    """The name of a process of this host that is no more."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    host, _, started, namespace = process_name().split("/")
    return f"{host}/{child}/{started}/{namespace}"


optuna.logging.set_verbosity(optuna.logging.WARNING)
