"""Studies of many trials, written within seconds: rows and lines are what a run of `tune` would have left.

`python -m tests.support.large_studies STORAGE COUNT [TIMES]` fills a storage by hand.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from flashgen.gen.families import FAMILIES
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.gen.variant import Variant
from flashgen.tuner.evaluate.measure import median, spread, tflops
from flashgen.tuner.evaluate.outcome import Measurement, Outcome, Status
from flashgen.tuner.predict.catalogue import Catalogue, build_catalogue
from flashgen.tuner.store.about import About
from flashgen.tuner.store.liveness import OWNER
from flashgen.tuner.store.makers import Makers
from flashgen.tuner.store.other_coordinators import HELD
from flashgen.tuner.store.studies import (
    OUTCOME,
    distributions,
    open_storage,
    open_study,
    outcome_to_dict,
    plain_figures,
)
from optuna.distributions import distribution_to_json
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal._storage import JournalOperation
from optuna.trial import Trial, TrialState

#: A family, problem and card with 22,268 legal variants.
FAMILY, PROBLEM, LIMITS = FAMILIES["wgmma"], Problem(dtype="f16", head_dim=64), PRESETS["h200"]
#: Who ran the trials: a run of another host that is over.
GONE = "elsewhere/4711/1177495/4026531836/0"
#: When the first trial began, and how long each took.
BEGAN = datetime.datetime(2026, 11, 1, 8, 30, tzinfo=datetime.UTC)
TRIAL_SECONDS = 2.5
#: What of the variants fails, and how.
FAILURES = (
    (Status.SPILLED, 0.10, "{} bytes of registers spilled to memory, 0 allowed"),
    (Status.COMPILE_FAILED, 0.02, "ptxas error   : Entry function uses too much shared data ({} bytes)"),
    (Status.WRONG, 0.01, "case 3: head 0: error 1.{}e-02, 2e-06 allowed"),
)


@dataclass(frozen=True)
class Ran:
    """A finished trial as the search left it."""

    outcome: Outcome
    origin: str
    began: datetime.datetime

    @property
    def ended(self) -> datetime.datetime:
        return self.began + datetime.timedelta(seconds=TRIAL_SECONDS)

    @property
    def us(self) -> float | None:
        return self.outcome.measurement.median_us if self.outcome.measurement else None

    @property
    def state(self) -> TrialState:
        return TrialState.PRUNED if self.us is None else TrialState.COMPLETE

    @property
    def user_attributes(self) -> dict[str, Any]:
        figures = plain_figures(self.outcome)
        held = {OWNER: GONE, "origin": self.origin, HELD: True}
        return {**held, **figures, OUTCOME: outcome_to_dict(self.outcome)}

    @property
    def system_attributes(self) -> dict[str, Any]:
        if self.us is not None or not hasattr(Trial, "set_constraint"):
            return {}
        return {f"constraints:{self.outcome.status}": 1.0}


def believable(catalogue: Catalogue, count: int, *, times: int = 10, seed: int = 0) -> Iterator[Ran]:
    """Yields trials of so many variants, none twice, each timed ``times`` times.

    Every parameter's value has its worth, and the card its noise; some kernels fail.
    """
    rng = np.random.default_rng(seed)
    rows = rng.permutation(len(catalogue))[:count]
    assert len(rows) == count, f"the space has {len(rows)} variants, {count} were asked for"
    log_us = np.zeros(len(catalogue))
    for codes, parameter in zip(catalogue.codes, catalogue.family.parameters(), strict=True):
        log_us += rng.normal(scale=rng.choice([0.03, 0.3]), size=len(parameter.choices))[codes]
    shortest_us = catalogue.problem.flops / 4e14 * 1e6
    us = shortest_us * np.exp(log_us - log_us.min())
    for number, row in enumerate(rows):
        variant = catalogue.variant(int(row))
        origin = "default" if number == 0 else "predicted best" if number < 6 else "model"
        began = BEGAN + number * datetime.timedelta(seconds=TRIAL_SECONDS)
        failure = _failure(rng.random())
        if failure is None:
            noisy = us[row] * (1 + np.abs(rng.normal(scale=0.01, size=times)))
            outcome = _fine(catalogue, variant, tuple(noisy.tolist()))
        else:
            status, reason = failure
            outcome = Outcome(variant=variant, status=status, reason=reason.format(8 * (number % 40 + 1)))
        seconds = {"compile": round(rng.uniform(1, 9), 3), "validate": 0.31, "measure": 0.2}
        yield Ran(replace(outcome, seconds=seconds), origin, began)


def _failure(draw: float) -> tuple[Status, str] | None:
    for status, part, reason in FAILURES:
        if draw < part:
            return status, reason
        draw -= part
    return None


def _fine(catalogue: Catalogue, variant: Variant, times_us: tuple[float, ...]) -> Outcome:
    problem, limits = catalogue.problem, catalogue.limits
    measurement = Measurement(
        times_us=times_us,
        median_us=median(times_us),
        spread=spread(times_us),
        tflops=tflops(problem, median(times_us)),
        registers=min(variant.registers(problem, limits), limits.max_registers_per_thread),
        spill_bytes=0,
        smem_bytes=variant.smem_bytes(problem, limits),
        occupancy=0.5,
        error=3.1e-7,
    )
    return Outcome(variant=variant, status=Status.OK, measurement=measurement)


def about_of(catalogue: Catalogue, *, toolkit: str = "stand-in 1.0", driver: str = "580") -> About:
    """Returns what a study of the catalogue's family, timed on its card, says of itself."""
    makers = Makers.of(catalogue.family, toolkit, None)
    return About(
        problem=catalogue.problem,
        limits=catalogue.limits,
        family=catalogue.family,
        predicted=False,
        driver=driver,
        toolkit=toolkit,
        flashgen="0.1.0",
        seed=0,
        mark=makers.mark,
        identity=makers.identities[0],
        cost_model=None,
    )


def fill(where: str, about: About, trials: Iterable[Ran]) -> str:
    """Adds finished trials to the study of that name, made where it is not there. Returns the name."""
    storage = open_storage(where)
    study = open_study(storage, where, about.study, about.attributes())
    first = storage.get_n_trials(study._study_id)
    texts = {name: distribution_to_json(each) for name, each in distributions(about.family).items()}
    if isinstance(storage, JournalStorage):
        _write_lines(Path(where), study._study_id, _count_lines(storage), about, texts, trials)
    else:
        assert isinstance(storage, RDBStorage)
        _Tables(storage).write(study._study_id, first, about, texts, trials)
        storage.engine.dispose()
    return about.study


def _internal(about: About, variant: Variant) -> dict[str, float]:
    """A trial's parameters as Optuna keeps them: the index of each value among the choices."""
    spaces = distributions(about.family)
    return {name: spaces[name].to_internal_repr(value) for name, value in variant.to_dict().items()}


# -- databases -----------------------------------------------------------------------------------------------


class _Tables:
    """Optuna's tables, written a thousand trials at a time past its sessions, which take milliseconds for
    each."""

    AT_ONCE = 1000

    def __init__(self, storage: RDBStorage) -> None:
        from optuna.storages._rdb import models

        self._models = models
        self._connection = storage.engine.raw_connection()
        self._is_postgres = storage.engine.dialect.name == "postgresql"

    def write(
        self, study: int, first: int, about: About, texts: dict[str, str], trials: Iterable[Ran]
    ) -> None:
        cursor = self._connection.cursor()
        cursor.execute("SELECT coalesce(max(trial_id), 0) FROM trials")
        following = cursor.fetchone()[0] + 1  # type: ignore[index]
        rows: dict[str, list[tuple[Any, ...]]] = {}
        for number, ran in enumerate(trials, first):
            self._rows(rows, following, number, study, about, texts, ran)
            following += 1
            if len(rows["trials"]) == self.AT_ONCE:
                self._flush(rows)
        self._flush(rows)
        if self._is_postgres:
            self._connection.cursor().execute(
                "SELECT setval(pg_get_serial_sequence('trials', 'trial_id'), max(trial_id)) FROM trials"
            )
        self._connection.commit()
        self._connection.close()

    def _rows(
        self,
        rows: dict[str, list[tuple[Any, ...]]],
        trial: int,
        number: int,
        study: int,
        about: About,
        texts: dict[str, str],
        ran: Ran,
    ) -> None:
        times = (self._stored(ran.began, "start"), self._stored(ran.ended, "complete"))
        rows.setdefault("trials", []).append((trial, number, study, ran.state.name, *times))
        rows.setdefault("trial_params", []).extend(
            (trial, name, code, texts[name]) for name, code in _internal(about, ran.outcome.variant).items()
        )
        rows.setdefault("trial_user_attributes", []).extend(
            (trial, key, json.dumps(value)) for key, value in ran.user_attributes.items()
        )
        rows.setdefault("trial_system_attributes", []).extend(
            (trial, key, json.dumps(value)) for key, value in ran.system_attributes.items()
        )
        if ran.us is not None:
            rows.setdefault("trial_values", []).append((trial, 0, ran.us, "FINITE"))

    def _stored(self, when: datetime.datetime, which: str) -> str:
        """A time as this version of Optuna keeps it: UTC, or local time."""
        model = self._models.TrialModel(
            **{f"datetime_{which}": when.astimezone().replace(tzinfo=None)}, state=TrialState.COMPLETE
        )
        kept = getattr(model, f"_datetime_{which}_utc", None) or getattr(model, f"datetime_{which}")
        return kept.isoformat(sep=" ", timespec="microseconds")

    def _flush(self, rows: dict[str, list[tuple[Any, ...]]]) -> None:
        cursor: Any = self._connection.cursor()
        columns = {
            "trials": "trial_id, number, study_id, state, datetime_start, datetime_complete",
            "trial_params": "trial_id, param_name, param_value, distribution_json",
            "trial_user_attributes": "trial_id, key, value_json",
            "trial_system_attributes": "trial_id, key, value_json",
            "trial_values": "trial_id, objective, value, value_type",
        }
        for table, names in columns.items():
            filled = rows.pop(table, [])
            if self._is_postgres:
                with cursor.copy(f"COPY {table} ({names}) FROM STDIN") as copy:
                    for row in filled:
                        copy.write_row(row)
            else:
                marks = ", ".join("?" * (names.count(",") + 1))
                cursor.executemany(f"INSERT INTO {table} ({names}) VALUES ({marks})", filled)


# -- journals ------------------------------------------------------------------------------------------------


def _count_lines(storage: BaseStorage) -> int:
    """The number of the journal's trials so far, of all studies: they are counted together."""
    return sum(storage.get_n_trials(each._study_id) for each in storage.get_all_studies())


def _write_lines(
    path: Path, study: int, first: int, about: About, texts: dict[str, str], trials: Iterable[Ran]
) -> None:
    with path.open("a") as file:
        for trial, ran in enumerate(trials, first):
            for line in _lines(study, trial, about, texts, ran):
                file.write(json.dumps({"worker_id": "made-up", **line}, separators=(",", ":")) + "\n")


def _lines(study: int, trial: int, about: About, texts: dict[str, str], ran: Ran) -> Sequence[dict[str, Any]]:
    attributes = ran.user_attributes
    at_once = {key: attributes.pop(key) for key in (OWNER, "origin")}
    operation, mine = JournalOperation, {"trial_id": trial}
    return [
        {
            "op_code": operation.CREATE_TRIAL,
            "study_id": study,
            "datetime_start": ran.began.isoformat(timespec="microseconds"),
            "state": TrialState.RUNNING,
            "value": None,
            "values": None,
            "distributions": texts,
            "params": _internal(about, ran.outcome.variant),
            "user_attrs": at_once,
            "system_attrs": {},
            "intermediate_values": {},
        },
        *(
            {"op_code": operation.SET_TRIAL_USER_ATTR, **mine, "user_attr": {key: value}}
            for key, value in attributes.items()
        ),
        *(
            {"op_code": operation.SET_TRIAL_SYSTEM_ATTR, **mine, "system_attr": {key: value}}
            for key, value in ran.system_attributes.items()
        ),
        {
            "op_code": operation.SET_TRIAL_STATE_VALUES,
            **mine,
            "state": ran.state,
            "values": None if ran.us is None else [ran.us],
            "datetime_complete": ran.ended.isoformat(timespec="microseconds"),
        },
    ]


# -- by hand -------------------------------------------------------------------------------------------------


def main(where: str, count: str, times: str = "10") -> None:
    catalogue = build_catalogue(FAMILY, PROBLEM, LIMITS)
    print(fill(where, about_of(catalogue), believable(catalogue, int(count), times=int(times))))


if __name__ == "__main__":
    main(*sys.argv[1:])
