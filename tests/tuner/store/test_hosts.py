"""Three coordinators on one study, each on a host of its own as far as they can tell: no variant is tried
twice, and what a killed one held is tried by the others."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from flashgen.gen.limits import PRESETS
from flashgen.tuner.errors import FlashgenError
from flashgen.tuner.evaluate.outcome import Measurement, Outcome, Status
from flashgen.tuner.extras import getting
from flashgen.tuner.predict.catalogue import build_catalogue
from flashgen.tuner.search.ask_tell import Search
from flashgen.tuner.shelf.winners import kernels_in_storage
from flashgen.tuner.store import liveness
from flashgen.tuner.store.liveness import HEARTBEAT, OWNER, Pulse, Watch, is_dead, owner
from flashgen.tuner.store.studies import OUTCOME, open_storage, open_study
from optuna.study import get_all_study_names, load_study
from optuna.trial import TrialState

from tests.support import ROOT
from tests.support.depth import sampled
from tests.support.postgres import postgres_server
from tests.support.stand_ins import LADDER, PROBLEM, cost

HELD = {"bc": 16, "br": 64, "hoisted": True, "vec": 4, "coalesced": True}


@pytest.fixture(params=sampled(["journal", "sqlite", "postgresql", "grpc"], 1))
def storage(request, tmp_path):
    """Where the study is kept."""
    if request.param == "postgresql":
        with postgres_server() as url:
            yield url
    elif request.param == "grpc":
        pytest.importorskip("grpc", reason=getting("grpc"))
        with proxy_server(str(tmp_path / "trials.sqlite3")) as url:
            yield url
    else:
        yield str(tmp_path / f"trials.{request.param if request.param == 'journal' else 'sqlite3'}")


@contextlib.contextmanager
def proxy_server(behind: str) -> Iterator[str]:
    """Optuna's gRPC proxy before a storage."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = (
        "from optuna.storages import get_storage, run_grpc_proxy_server\n"
        f"run_grpc_proxy_server(get_storage('sqlite:///{behind}'), host='127.0.0.1', port={port})"
    )
    server = subprocess.Popen([sys.executable, "-W", "ignore", "-c", script], stderr=subprocess.DEVNULL)
    try:
        yield f"grpc://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def text(variant: dict) -> str:
    return json.dumps(variant, sort_keys=True)


def test_three_hosts_share_a_study_and_one_dies(tmp_path, storage):
    command = [sys.executable, "-m", "tests.support.hosts", str(tmp_path), storage, json.dumps(HELD)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    tried: Counter[str] = Counter()
    for path in tmp_path.glob("tried-*"):
        lines = path.read_text().removesuffix("stuck").splitlines()
        assert lines, f"{path.name} took no part"
        tried.update(text(json.loads(line)) for line in lines)
    assert set(tried.values()) == {1}
    # The whole space, with what the dead one held, which the study knows as given up.
    space = build_catalogue(LADDER, PROBLEM, PRESETS["h200"], HELD)
    assert set(tried) == {text(space.variant(row).to_dict()) for row in range(len(space))}
    opened = open_storage(storage)
    (name,) = get_all_study_names(opened)
    trials = load_study(study_name=name, storage=opened).trials
    states = Counter(t.state for t in trials)
    assert states[TrialState.COMPLETE] == len(space) and not states[TrialState.RUNNING]
    kept = [text(t.user_attrs[OUTCOME]["variant"]) for t in trials if t.state is TrialState.COMPLETE]
    assert len(set(kept)) == len(kept)
    stuck = [
        t for t in trials if t.user_attrs.get(OWNER, "").startswith("doomed/") and t.state is TrialState.FAIL
    ]
    assert stuck and any(HEARTBEAT in t.user_attrs for t in stuck + trials)
    results = {name: (variant, counts) for name, variant, counts in map(json.loads, done.stdout.splitlines())}
    assert set(results) == {"one", "two"}
    fastest = min(cost(space.variant(row)) for row in range(len(space)))
    for variant, counts in results.values():
        assert cost(LADDER(**variant)) == fastest and sum(counts) == len(space)
    assert min(cost(e.kernel.variant) for e in kernels_in_storage(storage)) == fastest


# -- claims ------------------------------------------------------------------------------------------------


def fine(variant) -> Outcome:
    us = cost(variant)
    measurement = Measurement(
        times_us=(us,), median_us=us, spread=0.0, tflops=1.0, registers=40, spill_bytes=0, smem_bytes=0,
        occupancy=0.5, error=1e-7,
    )  # fmt: skip
    return Outcome(variant=variant, status=Status.OK, measurement=measurement)


def join(where: str) -> Search:
    study = open_study(open_storage(where), where, "shared", {})
    return Search(build_catalogue(LADDER, PROBLEM, PRESETS["h200"], HELD), study, seed=0, pulse=Pulse())


@pytest.mark.parametrize("suffix", ["journal", "sqlite3"])
def test_those_that_want_the_same_at_once_do_not_both_get_it(tmp_path, suffix):
    """The same seed, so the same queue: they meet at every step."""
    where = str(tmp_path / f"trials.{suffix}")
    join(where)
    tried: list[str] = []
    start = threading.Barrier(3)
    failures: list[BaseException] = []

    def coordinate() -> None:
        try:
            search = join(where)
            start.wait()
            for _ in range(4):
                proposal = search.ask()
                assert proposal is not None
                tried.append(proposal.variant.name)
                assert search.tell(proposal, fine(proposal.variant))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=coordinate) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures and len(tried) == len(set(tried)) == 12
    assert len(join(where).earlier) == 12


def test_a_coordinator_learns_what_others_found(tmp_path):
    where = str(tmp_path / "trials.journal")
    one, two = join(where), join(where)
    best = None
    for _ in range(6):
        proposal = one.ask()
        assert proposal is not None
        one.tell(proposal, fine(proposal.variant))
        best = min(best or 1e9, cost(proposal.variant))
    held = one.ask()
    two.look_at_others()
    assert two.best_us == best and len(two.others.outcomes) == 6 and two.others.in_flight == 1
    assert held is not None
    one.abandon(held)
    two.look_at_others()
    assert two.others.in_flight == 0
    assert two.catalogue.num_unseen == len(two.catalogue) - 6


def test_who_was_given_up_is_told_so(tmp_path, monkeypatch):
    """As after a night's sleep: the others have taken its trial for a dead one's."""
    where = str(tmp_path / "trials.journal")
    one = join(where)
    proposal = one.ask()
    assert proposal is not None
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    monkeypatch.setattr(liveness, "GRACE_SECONDS", 0.0)
    two = join(where)
    two.look_at_others()
    again = two.ask()
    assert again is not None and two.catalogue.num_unseen == len(two.catalogue) - 1
    monkeypatch.undo()
    assert not one.tell(proposal, fine(proposal.variant))
    assert one.catalogue.num_unseen == len(one.catalogue)
    assert two.tell(again, fine(again.variant))


# -- heartbeats ---------------------------------------------------------------------------------------------


def test_a_run_is_dead_when_its_process_or_it_itself_is(monkeypatch):
    pulse = Pulse()
    assert not is_dead(pulse.owner) and not is_dead("elsewhere/1/1/1/0") and not is_dead("")
    host, pid, started, namespace, _ = pulse.owner.split("/")
    assert is_dead(f"{host}/{pid}/{int(started) - 1}/{namespace}/0")
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert is_dead(f"{host}/{gone.pid}/{started}/{namespace}/0")
    # Of another container on a host of that name nothing is known.
    assert not is_dead(f"{host}/{gone.pid}/{started}/{int(namespace or 0) + 1}/0")
    pulse.close()
    assert is_dead(pulse.owner)
    assert owner() != owner()


def test_a_heart_that_stands_still_is_a_dead_ones(tmp_path, monkeypatch):
    where = str(tmp_path / "trials.journal")
    study = open_study(open_storage(where), where, "watched", {})
    trial = study.ask()
    trial.set_user_attr(OWNER, "elsewhere/1/1/1/0")
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    watch = Watch(grace_s=60.0)

    def lives() -> bool:
        return watch.lives(study.trials[0])

    assert lives()
    now[0] += 59
    assert lives()
    trial.set_user_attr(HEARTBEAT, 1)
    assert lives()
    now[0] += 59
    assert lives()
    now[0] += 2
    assert not lives()


def test_a_pulse_beats_for_what_is_in_flight(tmp_path):
    where = str(tmp_path / "trials.journal")
    study = open_study(open_storage(where), where, "beating", {})
    first, second = study.ask(), study.ask()
    pulse = Pulse(beat_s=0.02)
    pulse.add(first)
    pulse.add(second)
    pulse.remove(second)
    deadline = time.monotonic() + 10
    while study.trials[0].user_attrs.get(HEARTBEAT, 0) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    pulse.close()
    beats = study.trials[0].user_attrs[HEARTBEAT]
    assert beats >= 2 and HEARTBEAT not in study.trials[1].user_attrs
    time.sleep(0.1)
    assert study.trials[0].user_attrs[HEARTBEAT] <= beats + 1


# -- names of storages --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("grpc://", "host and port, as in grpc://tuning-host:13000"),
        ("grpc://127.0.0.1:1", "cannot be kept in grpc://127.0.0.1:1"),
        ("postgresql://u:secret@127.0.0.1:1/db", r"kept in postgresql://u:\*\*\*@127.0.0.1:1/db: .*refused"),
    ],
)
def test_a_server_that_is_not_there_is_told(where, words, monkeypatch):
    pytest.importorskip("grpc" if where.startswith("grpc") else "psycopg")
    monkeypatch.setattr("flashgen.tuner.store.studies.PROXY_SECONDS", 0.2)
    with pytest.raises(FlashgenError, match=words) as told:
        open_storage(where)
    assert "secret" not in str(told.value) and "--storage" in str(told.value)


@pytest.mark.parametrize(
    ("where", "extra"), [("mysql://h/db", "mysql"), ("postgres://h/db", "postgresql"), ("grpc://h:1", "grpc")]
)
def test_a_driver_that_is_missing_is_told(where, extra, monkeypatch):
    for module in ("pymysql", "MySQLdb", "mysql", "mysql.connector", "psycopg", "psycopg2", "pg8000", "grpc"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(FlashgenError, match=rf"pip install -e '\.\[{extra}\]'` in a checkout") as told:
        open_storage(where)
    assert getting(extra) in str(told.value)
