"""Every command, and every error a user can make: its message, its exit code, its JSON."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from flashgen.gen import families
from flashgen.gen.emit.cuda import FACTS
from flashgen.tuner.cards import cuda, driver
from flashgen.tuner.cards.names import cards
from flashgen.tuner.cli import _printable_errors
from flashgen.tuner.shelf import library
from flashgen.tuner.shelf.emitted_kernels import read_emitted

from tests.support.caches import without_kernels
from tests.support.command_line import command_runner

SIM = ["--device", "sim:gtx-1080"]
TUNE = "tune --device sim:gtx-1080 --d 32"
#: Few variants of the family that is enumerated fastest.
HELD = ["--family=ladder", *(f"--set={s}" for s in ("br=64", "bc=32", "hoisted=true", "transposed=true"))]


@pytest.fixture
def flashgen(tmp_path, monkeypatch):
    """Runs a command in an empty folder; gives exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLASHGEN_CACHE", str(without_kernels(tmp_path / "cache")))
    monkeypatch.setenv("COLUMNS", "200")
    return command_runner()


@pytest.fixture
def nothing_shipped(tmp_path, monkeypatch):
    """A flashgen that comes without tuned kernels."""
    empty = tmp_path / "shipped"
    empty.mkdir()
    monkeypatch.setattr(library, "shipped_folder", lambda: empty)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A folder in which one kernel was tuned on the emulated card, and what the command printed."""
    folder = tmp_path_factory.mktemp("tuned")
    program = "from flashgen.tuner.cli import main; main()"
    command = [sys.executable, "-c", program, "tune", *SIM, "--d", "32", "--trials", "3", "--json", *HELD]
    environment = {**os.environ, "FLASHGEN_CACHE": str(without_kernels(folder / "cache"))}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout), done.stderr


COMMANDS = ("tune", "space", "emit", "list", "diff", "export", "import", "validate", "devices", "ladder")


def test_version(flashgen):
    assert flashgen("--version").stdout.startswith("flashgen 0.")


#: What only a command that works with it may wait for.
HEAVY = {"jinja2", "matplotlib", "numpy", "optuna", "pynvml", "pycuda", "scipy", "sklearn", "sqlalchemy"}


@pytest.mark.parametrize(
    ("argument", "heavy"), [("--version", HEAVY | {"rich", "flashgen.gen"}), ("--help", HEAVY)]
)
def test_the_program_answers_before_it_imports_what_commands_need(argument, heavy):
    program = f"""
import sys
from flashgen.tuner.cli import main
sys.argv = ["flashgen", {argument!r}]
try:
    main()
finally:
    print(*sys.modules, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and "flashgen" in done.stdout, done.stderr
    assert not heavy & set(done.stderr.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_json(flashgen, command):
    text = flashgen(command, "--help").stdout
    assert f"Example: flashgen {command}" in text
    assert "--json" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("tune --device sim:gtx-1081", "unknown preset 'gtx-1081'; did you mean 'gtx-1080'?"),
        ("tune --device gpu", "unknown device 'gpu'"),
        ("tune --device -1", "unknown device '-1'"),
        ("tune --device sim:t4 --d 0", "head_dim is 0; it must lie in 1..256"),
        ("tune --device sim:t4 --d 257", "head_dim is 257; it must lie in 1..256"),
        ("tune --device sim:t4 --seqlen 0", "seqlen_q is 0"),
        ("tune --device ²", "unknown device '²'"),
        ("tune --device 99999999999999999999", "unknown device '99999999999999999999'"),
        (f"tune --device sim:t4 --batch {10**30}", "batch is about 2^100; it must lie in 1..2147483647"),
        (f"tune --device sim:t4 --heads {2**40}", "num_q_heads is 1099511627776; it must lie in"),
        (f"tune --device sim:t4 --seqlen {2**64}", "seqlen_q is about 2^65; it must lie in"),
        (
            "tune --device sim:t4 --batch 4096 --heads 4096",
            "q, k, v and o take 65,536 GiB, no card holds more",
        ),
        (
            "tune --device sim:t4 --heads 12 --kv-heads 5",
            "num_q_heads 12 is not a multiple of num_kv_heads 5",
        ),
        ("tune --device sim:t4 --dtype f23", "unknown dtype 'f23'; did you mean 'f32'?"),
        ("tune --device sim:t4 --dtype bf61", "unknown dtype 'bf61'; did you mean 'bf16'?"),
        ("tune --device sim:a100 --precision tf23", "unknown precision 'tf23'; did you mean 'tf32'?"),
        (
            "space --device a100 --dtype f16 --precision tf32",
            "precision tf32 is one of f32, not of f16; leave --precision out, or choose --dtype f32",
        ),
        ("emit best.py --preset h200 --precision 3xtf32 --dtype bf16", "precision 3xtf32 is one of f32"),
        ("tune --device sim:t4 --dv 300", "head_dim_v is 300; it must lie in 1..256"),
        ("tune --device sim:t4 --dv 0", "head_dim_v is 0; leave --dv out for values as wide as keys"),
        ("tune --device sim:t4 --family smit", "unknown family 'smit'; did you mean 'simt'?"),
        ("tune --device sim:t4 --set bq=64", "no parameter 'bq'"),
        ("tune --device sim:t4 --set stage=2", "did you mean 'stages'?"),
        ("tune --device sim:t4 --set bc=7", "bc=7 is not a choice; choose from"),
        ("tune --device sim:t4 --set bc", "is not of the form name=value"),
        (
            "tune --device sim:t4 --family simt --family ladder --set bc=64",
            "--set holds parameters of one family",
        ),
        ("space --device sim:nope --d 64", "unknown preset 'nope'"),
        ("emit best.txt", "name the file .cu (CUDA C++) or .py (Python module)"),
        ("emit my-best.py", "could not be imported"),
        ("emit class.py", "could not be imported"),
        ("emit .", "cannot emit '.'; name the file .cu"),
        ("emit best.cu --preset sm_59", "unknown preset 'sm_59'"),
        ("emit best.cu --preset 0", "unknown preset '0'"),
        ("validate notes.txt", "name one that `flashgen emit` wrote"),
        ("emit best.cu --preset h300", "unknown preset 'h300'"),
        ("emit best.cu --preset h200 --device 0", "give one"),
        ("emit best.cu --set bc=64", "--set needs a card"),
        ("emit best.cu --preset h200 --set bc=63", "bc=63 is not a choice"),
        ("emit best.cu --preset gtx-1080 --d 300", "head_dim is 300"),
        ("ladder --device sim:t4 --cases t12", "unknown case 't12'"),
    ],
)
def test_wrong_usage_exits_2_with_the_way_out(flashgen, arguments, words):
    result = flashgen(*arguments.split(), code=2)
    assert words in result.stderr
    assert "Traceback" not in result.output
    assert result.stderr.startswith("error: ") and len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


def test_an_error_in_json(flashgen):
    result = flashgen("tune", "--device", "sim:gtx-1081", "--json", code=2)
    assert json.loads(result.stdout) == {
        "error": "unknown preset 'gtx-1081'; did you mean 'gtx-1080'?",
        "exit_code": 2,
    }


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--trials", "many"),
        ("--trials", "0"),
        ("--minutes", "0"),
        ("--minutes", "nan"),
        ("--minutes", "inf"),
        ("--jobs", "0"),
        ("--seed", "-1"),
        ("--d", "x"),
    ],
)
def test_an_option_of_the_wrong_type_or_out_of_range(flashgen, option, value):
    assert option in flashgen("tune", *SIM, option, value, code=2).stderr


@pytest.mark.parametrize(
    ("arguments", "name", "reason"),
    [
        (
            "tune --device sim:gtx-1080 --dtype bf16",
            "bf16_d64",
            "family simt computes f32, this problem is bf16",
        ),
        (
            "space --device gtx-1080 --precision tf32 --dv 32",
            "f32_tf32_d64v32",
            "family simt computes by IEEE multiply-adds, precision tf32 is asked for",
        ),
        (
            "space --device gtx-1080 --precision 3xf16",
            "f32_3xf16_d64",
            "family mma: tensor cores multiply f16 from sm_75 on, this is sm_61",
        ),
    ],
)
def test_where_no_family_serves_each_says_why(flashgen, nothing_shipped, arguments, name, reason):
    result = flashgen(*arguments.split(), code=1)
    assert f"no kernel family serves {name} on GTX 1080 (sm_61): " in result.stderr
    assert reason in result.stderr and "choose another --dtype, --precision or card" in result.stderr
    assert "ladder" not in result.stderr and len(result.stderr.splitlines()) == 1


def test_a_family_that_computes_something_else_says_so(flashgen, nothing_shipped):
    arguments = ["--family", "simt", "--dtype", "f16"]
    told = "no variant of 'simt' is legal for f16_d64 on H200"
    for command in (["tune", "--device", "sim:h200"], ["emit", "best.py", "--preset", "h200"]):
        result = flashgen(*command, *arguments, code=2 if command[0] == "emit" else 1)
        assert told in result.stderr and "family simt computes f32, this problem is f16" in result.stderr
    counts = json.loads(flashgen("space", "--device", "h200", *arguments, "--json").stdout)
    assert counts["legal"] == 0 and counts["removed"] == {"arithmetic": counts["total"]}
    assert counts["problem"]["dtype"] == "f16" and counts["problem"]["head_dim_v"] == 64


def test_a_setting_that_several_families_know_needs_one_named(flashgen, nothing_shipped, monkeypatch):
    monkeypatch.setattr(families, "TEACHING", frozenset())
    for command in ("tune --device sim:gtx-1080", "emit best.cu --preset gtx-1080"):
        result = flashgen(*command.split(), "--set", "bc=64", code=2)
        words = "--set holds parameters of one family; name just one, --family simt or --family ladder"
        assert words in result.stderr
    # What only one of them knows names it.
    text = flashgen("emit", "best.cu", "--preset", "gtx-1080", "--d", "32", "--set", "hoisted=true").stdout
    assert "ladder: " in text


def test_the_first_family_that_serves_is_shown(flashgen):
    data = json.loads(flashgen("space", "--device", "gtx-1080", "--limit", "0", "--json").stdout)
    assert data["family"] == "simt"
    assert (data["problem"]["precision"], data["problem"]["head_dim_v"]) == ("auto", 64)
    text = flashgen("space", "--device", "gtx-1080", "--limit", "0", "--precision", "ieee").stdout
    assert "f32 (ieee), batch 4" in text


def test_an_illegal_variant_names_both_numbers(flashgen):
    arguments = ["--family", "ladder", "--set", "br=256", "--set", "bc=64", "--set", "q_in_registers=false"]
    result = flashgen("tune", *SIM, "--d", "256", *arguments, code=2)
    assert "shared memory: needs 393216 bytes, sm_61 allows 49152" in result.stderr


@pytest.mark.parametrize(
    ("missing", "command", "words"),
    [
        ("card", "tune --device 0", "or emulate one, whose times are predictions: `--device sim:h200`"),
        ("g++", "tune --device sim:gtx-1080 --d 32", "apt install g++"),
        ("out", "tune --device sim:gtx-1080 --d 32 --out blocked/out", "choose another with --out"),
        ("storage", "tune --device sim:gtx-1080 --d 32 --storage blocked/trials.sqlite3", "--storage"),
        ("driver", "tune --device sim:gtx-1080 --d 32 --storage nosql://host/db", "--storage"),
        ("file", "validate missing.py", "missing.py cannot be read: No such file or directory; name a file"),
        (
            "storage",
            "emit best.cu --storage missing.sqlite3",
            "does not exist; name one that `flashgen tune`",
        ),
        ("storage", f"{TUNE} --storage .", "it is a folder; name a file in it"),
        ("storage", f"{TUNE} --storage blocked", "file is not a database; name another place"),
        ("storage", f"{TUNE} --storage sqlite://", "nothing would be kept"),
        (
            "driver",
            f"{TUNE} --storage postgresql://u:pw@h/db",
            "u:***@h/db: its driver, the Python module psyco",
        ),
    ],
)
def test_what_is_missing_exits_1_with_the_way_out(flashgen, tmp_path, monkeypatch, missing, command, words):
    (tmp_path / "blocked").write_text("in the way")
    for module in ("psycopg", "psycopg2"):
        monkeypatch.setitem(sys.modules, module, None)
    if missing == "card":
        monkeypatch.setitem(sys.modules, "pycuda", None)
        monkeypatch.setitem(sys.modules, "pycuda.driver", None)
        monkeypatch.setattr(driver, "library", no_driver)
        cuda._driver.cache_clear()
    if missing == "g++":
        monkeypatch.setenv("PATH", "")
        monkeypatch.delenv("CXX", raising=False)
    held = HELD if command.startswith("tune") else []
    result = flashgen(*command.split(), *held, code=1)
    assert words in result.stderr and result.stderr.startswith("error: ")
    assert "Traceback" not in result.output


def no_driver() -> Any:
    raise OSError("libcuda.so.1: cannot open shared object file")


def test_space_counts_every_combination(flashgen):
    data = json.loads(
        flashgen("space", "--family", "ladder", "--device", "gtx-1080", "--d", "40", "--json").stdout
    )
    assert data["total"] == data["legal"] + sum(data["removed"].values()) > 1000
    assert data["removed"]["shared memory"] > 0
    times = [s["predicted_us"] for s in data["survivors"]]
    assert times == sorted(times) and len(times) == 20
    assert all(s["smem_bytes"] <= 49152 for s in data["survivors"])


def test_space_shows_rules_and_survivors(flashgen):
    text = flashgen(
        "space", "--family", "ladder", "--device", "sim:gtx-1080", "--d", "40", "--limit", "3"
    ).stdout
    assert "removed by shared memory" in text and "legal" in text
    assert "the 3 fastest predicted" in text


def test_space_judges_an_illegal_variant(flashgen):
    arguments = ["--family", "ladder", "--device", "rtx-3090", "--d", "256", "--set", "br=256"]
    text = flashgen("space", *arguments, "--set", "bc=64", "--set", "q_in_registers=false").stdout
    assert "illegal: shared memory: needs 393216 bytes, sm_86 allows 101376" in text
    data = json.loads(flashgen("space", *arguments, "--set", "q_in_registers=false", "--json").stdout)
    assert data["verdict"]["legal"] is False and data["verdict"]["rule"] == "shared memory"
    assert "bc" in data["verdict"]["completed_by_defaults"]


def test_space_judges_a_legal_variant(flashgen):
    settings = "br=64 bc=16 split_queries=true vec=4 hoisted=true coalesced=true stats_in_registers=true"
    settings += " transposed=true q_in_registers=true"
    held = [f"--set={s}" for s in settings.split()]
    result = flashgen("space", "--family", "ladder", "--device", "gtx-1080", "--d", "64", *held)
    assert "shared memory: needs 8192 bytes, sm_61 allows 49152" in result.stdout
    data = json.loads(
        flashgen("space", "--family", "ladder", "--device", "gtx-1080", "--d", "64", *held, "--json").stdout
    )
    assert (data["legal"], data["verdict"]["legal"], data["verdict"]["completed_by_defaults"]) == (
        1,
        True,
        [],
    )


LADDER_SPACE = ["space", "--family", "ladder", *SIM, "--d", "256", "--limit", "0"]


def test_space_names_the_nearest_legal_variant(flashgen):
    result = flashgen(*LADDER_SPACE, "--set", "q_in_registers=false")
    nearest = json.loads(flashgen(*LADDER_SPACE, "--set", "q_in_registers=false", "--json").stdout)
    variant, legal = nearest["verdict"]["nearest_legal"], nearest["legal"]
    assert legal > 0 and variant["q_in_registers"] is False
    assert f"{legal:,} variants with the held parameters are legal; the nearest has" in result.stdout
    held = [f"--set={name}={value}" for name, value in variant.items()]
    assert json.loads(flashgen(*LADDER_SPACE, *held, "--json").stdout)["verdict"]["legal"] is True


def test_space_says_when_no_variant_with_the_parameters_is_legal(flashgen):
    text = flashgen(
        *LADDER_SPACE, "--set", "br=256", "--set", "bc=64", "--set", "q_in_registers=false"
    ).stdout
    assert "no variant with the held parameters is legal; hold fewer or others" in text


def test_space_tells_what_is_legal_but_never_best(flashgen):
    arguments = ["space", *SIM, "--d", "64", "--limit", "0"]
    arguments += [f"--set={s}" for s in ("vec=1", "br=64", "threads_per_block=64", "bc=32")]
    advice = "vec=1, but 4 divides head dim 64 too"
    assert f"legal, but left out of the search: vector width: {advice}" in flashgen(*arguments).stdout
    verdict = json.loads(flashgen(*arguments, "--json").stdout)["verdict"]
    assert verdict["legal"] is True and advice in verdict["advice"]


def test_a_narrow_terminal_loses_no_words(flashgen, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    text = flashgen("space", "--family", "ladder", *SIM, "--d", "40", "--limit", "3").stdout
    assert "removed by shared memory" in text and "split_queries=" in text
    assert "…" not in text + flashgen("devices").stdout


def test_a_full_disk_behind_stdout(flashgen, tmp_path):
    program = [sys.executable, "-c", "from flashgen.tuner.cli import main; main()"]
    for arguments in (["devices"], ["devices", "--json"], ["space", *SIM, "--d", "300", "--json"]):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run([*program, *arguments], stdout=full, stderr=subprocess.PIPE, text=True)
        assert done.returncode in (1, 2) and "Traceback" not in done.stderr
        assert done.stderr.startswith("error: ")


def test_tune_prints_json_alone_and_says_predicted(tuned):
    folder, result, errors = tuned
    assert result["predicted"] is True
    assert result["counts"] == {"ok": 3}
    assert result["measurement"]["error"] < 2e-6
    assert {"br", "bc"} <= set(result["variant"])
    assert "predicted" in errors and "Traceback" not in errors
    for kind, file in result["files"].items():
        path = folder / file
        assert path.suffix == f".{kind}" and path.parent.name == "sim_gtx_1080"
    for kind in ("cu", "py"):
        text = " ".join((folder / result["files"][kind]).read_text().replace("//", "").split())
        assert "Predicted" in text and f"Tuned by flashgen {result['flashgen']}, seed 0." in text
    names = {"driver", "toolkit", "flashgen", "seed"}
    assert names <= set(result) and all(f'"{name}": ' in text for name in names)


@pytest.mark.thorough
def test_tune_with_tensor_cores(flashgen, nothing_shipped):
    """The one family that serves is found, its module says what it is and is proved in its class."""
    held = ["br=16", "bc=16", "q_in_registers=true", "layout=padded"]
    arguments = ["--device", "sim:a100", "--dtype", "bf16", "--d", "16", "--dv", "24", "--batch", "1"]
    arguments += ["--heads", "2", "--seqlen", "32", *(f"--set={each}" for each in held)]
    result = json.loads(flashgen("tune", *arguments, "--trials", "2", "--jobs", "2", "--json").stdout)
    assert result["family"] == "mma" and result["counts"] == {"ok": 2}
    assert (result["problem"]["dtype"], result["problem"]["head_dim_v"]) == ("bf16", 24)
    assert 2e-6 < result["measurement"]["error"] < 1e-2
    path = Path(result["files"]["py"])
    assert path == Path("out/sim_a100_sxm4_80gb/bf16_d16v24_b1_h2_n32.py")
    assert '"dtype": "bf16"' in path.read_text()
    emit = ["emit", "best.py", "--device", "sim:a100", "--dtype", "bf16", "--d", "16"]
    found = json.loads(flashgen(*emit, "--dv", "24", "--json").stdout)
    assert found["tuned"] and found["variant"] == result["variant"]
    told = flashgen(*emit, "--set", "br=16", "--set", "bc=16").stdout  # as wide values: another kernel
    assert "the variant asked for, untuned: bf16_d16 for A100" in told


def test_emit_writes_the_last_tuned(tuned, flashgen, nothing_shipped):
    folder, result, _ = tuned
    for name in ("best.cu", "best.py"):
        text = flashgen("emit", name, "--out", str(folder / "out")).stdout
        assert "the last tuned" in text and "predicted" in text
        kept = folder / result["files"][name[5:]]
        found, expected = (read_emitted(path).kernel for path in (Path(name), kept))
        assert (found.problem, found.variant, found.launches) == (
            expected.problem,
            expected.variant,
            expected.launches,
        )
    again = Path("best.cu").read_text().replace("best.cu", f"{Path(result['files']['cu']).name}")
    kept = (folder / result["files"]["cu"]).read_text()
    assert again.partition(FACTS)[0] == kept.partition(FACTS)[0]


def test_shipped_kernels_were_not_tuned_here(flashgen):
    told = flashgen("emit", "best.cu", code=1).stderr
    assert "nothing was tuned here yet: tune with `flashgen tune --device 0 --d 64`" in told
    assert not Path("best.cu").exists()
    # Both ways out that it names are open.
    flashgen(*told.rpartition("`flashgen ")[2].rstrip("`\n").split())
    assert "bf16, head dim 128" in Path("best.cu").read_text()
    told = flashgen("emit", "best.py", "--dtype", "bf16", "--d", "128").stdout
    assert "no card was named and none is here: NVIDIA H200 is the shipped kernels'" in told or cards()[0]


@pytest.mark.parametrize("suffix", ["cu", "py"])
@pytest.mark.parametrize("where", ["shipped", "tuned here"])
def test_the_command_in_a_tuned_file_writes_the_very_same_again(tuned, flashgen, suffix, where):
    """The same card, the same name, and what was measured."""
    chosen = ["--device", "h200", "--dtype", "bf16", "--d", "128", "--causal", "--seqlen", "512"]
    if where == "tuned here":
        shutil.copytree(tuned[0] / "out", "out")
        chosen = []
    name = f"best.{suffix}"
    flashgen("emit", name, *chosen)
    written = Path(name).read_text()
    assert ("Measured on NVIDIA H200" if chosen else "Predicted by a cost model") in written
    after, end = written.partition("Regenerate:")[2], {"py": '"""', "cu": "\n\n"}[suffix]
    command = after.partition(end)[0].replace("\\\n", " ").replace("//", "").split()
    assert command[:3] == ["flashgen", "emit", name]
    Path(name).unlink()
    flashgen(*command[1:])
    assert Path(name).read_text() == written


def test_emit_renews_the_module_of_an_older_flashgen(tuned, flashgen, nothing_shipped, tmp_path):
    folder, result, _ = tuned
    shutil.copytree(folder / "out", tmp_path / "out")
    module = tmp_path / result["files"]["py"]
    flashgen("emit", "best.py", "--out", str(tmp_path / "out"))
    whole = Path("best.py").read_text()
    module.write_text("# of another day\n")
    flashgen("emit", "best.py", "--out", str(tmp_path / "out"))
    assert Path("best.py").read_text() == whole


def test_emit_says_when_it_is_a_nearest_match(tuned, flashgen, nothing_shipped):
    out = str(tuned[0] / "out")
    text = flashgen("emit", "best.cu", *SIM, "--d", "32", "--seqlen", "512", "--out", out).stdout
    assert "nothing was tuned for just this; the best match is" in text and "asked for" in text
    data = json.loads(
        flashgen("emit", "best.cu", *SIM, "--d", "32", "--causal", "--out", out, "--json").stdout
    )
    assert data["tuned"] and data["predicted"] and "without the causal mask" in data["how"]


def test_emit_finds_what_only_the_trials_hold(tuned, flashgen, nothing_shipped, tmp_path):
    folder, result, _ = tuned
    storage = str(folder / "out" / "tuning.sqlite3")
    name = Path(result["files"]["cu"]).name
    flashgen("emit", name, "--out", str(tmp_path / "empty"), "--storage", storage)
    assert Path(name).read_text() == (folder / result["files"]["cu"]).read_text()


def test_emit_renders_a_variant_untuned(flashgen, nothing_shipped):
    data = json.loads(flashgen("emit", "best.py", "--preset", "v100", "--d", "32", *HELD, "--json").stdout)
    assert data["tuned"] is False and "untuned" in data["how"] and data["measurement"] is None
    assert (data["variant"]["br"], data["variant"]["bc"], data["arch"]) == (64, 32, 70)
    compile(Path("best.py").read_text(), "best.py", "exec")


@pytest.mark.parametrize("suffix", ["py", "cu"])
@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--preset", "gtx-1080", "--d", "32", "--causal", *HELD], ("f32_d32_causal", "attention_f32_d32")),
        (
            ["--preset", "a100", "--dtype", "bf16", "--d", "32", "--dv", "24", "--set", "br=64"],
            ("bf16_d32v24", "attention_bf16_d32v24"),
        ),
        (
            ["--preset", "a100", "--precision", "tf32", "--d", "32", "--set", "br=64"],
            ("f32_tf32_d32", "attention_f32_tf32_d32"),
        ),
    ],
    ids=["ladder", "mma-bf16", "mma-tf32"],
)
def test_the_command_in_an_emitted_file_writes_it_again(flashgen, nothing_shipped, suffix, options, names):
    flashgen("emit", f"best.{suffix}", *options)
    written = Path(f"best.{suffix}").read_text()
    after, end = written.partition("Regenerate:")[2], {"py": '"""', "cu": "\n\n"}[suffix]
    command = after.partition(end)[0].replace("\\\n", " ").replace("//", "").split()
    flashgen(*command[1:])

    def code(text: str) -> str:
        return text[text.index("#ifndef FLASHGEN_CAUSAL") :] if suffix == "cu" else text

    assert command[2] == f"best.{suffix}" and any(name in written for name in names)
    assert code(Path(command[2]).read_text()) == code(written)


def test_emit_names_the_limit_an_illegal_variant_breaks(flashgen, nothing_shipped):
    arguments = [
        "--family",
        "ladder",
        "--preset",
        "gtx-1080",
        "--d",
        "256",
        "--set",
        "br=256",
        "--set",
        "bc=64",
    ]
    result = flashgen("emit", "best.cu", *arguments, code=2)
    assert "shared memory: needs" in result.stderr and "sm_61 allows 49152" in result.stderr
    assert not Path("best.cu").exists()


def test_emit_where_nothing_was_tuned(flashgen, nothing_shipped):
    assert "nothing was tuned here yet" in flashgen("emit", "best.cu", code=1).stderr
    text = flashgen("emit", "best.cu", "--preset", "gtx-1080", "--d", "40", "--family", "ladder").stdout
    assert "nothing was tuned for f32, head dim 40 on GTX 1080" in text and "untuned" in text
    assert "attention_f32_d40" in Path("best.cu").read_text()
    assert read_emitted(Path("best.cu")).device == "GTX 1080"


def test_emit_does_not_pass_over_damaged_trials(flashgen, nothing_shipped, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tuning.sqlite3").write_text("damaged")
    assert "tuning.sqlite3: file is not a database" in flashgen("emit", "best.cu", code=1).stderr


def test_emit_to_a_place_that_cannot_be_written(tuned, flashgen, nothing_shipped, tmp_path):
    (tmp_path / "blocked").write_text("")
    result = flashgen("emit", "blocked/best.cu", "--out", str(tuned[0] / "out"), code=1)
    assert "cannot be written" in result.stderr
    (tmp_path / "folder.cu").mkdir()
    assert "is a folder" in flashgen("emit", "folder.cu", code=2).stderr


def test_validate_an_emitted_module(tuned, flashgen):
    folder, result, _ = tuned
    proof = json.loads(flashgen("validate", str(folder / result["files"]["py"]), *SIM, "--json").stdout)
    assert proof["worst"] < 2e-6 and set(proof["errors"]) == {"full", "causal"}


def test_validate_says_before_that_it_runs_the_file(flashgen, tmp_path):
    assert "native code" in " ".join(flashgen("validate", "--help").stdout.split())
    words = ["--preset", "gtx-1080", "--d", "32", *HELD]
    flashgen("emit", "best.cu", *words)
    told = flashgen("validate", "best.cu", "--device", "sim:none", code=2).stderr.splitlines()
    assert told[0].startswith("running what best.cu holds as native code") and told[1].startswith("error: ")


def test_devices(flashgen):
    data = json.loads(flashgen("devices", "--json").stdout)
    assert data["presets"]["gtx-1080"]["smem_per_block"] == 49152
    assert bool(data["cards"]) != bool(data["no_card_because"])
    tools = {tool["name"]: tool for tool in data["tools"]}
    assert {"nvcc", "g++", "NVRTC", "PyCUDA", "PyTorch"} <= set(tools)
    assert all(bool(tool["found"]) != bool(tool["missing"]) for tool in tools.values())
    assert "gtx-1080" in flashgen("devices").stdout


def test_doctor(flashgen, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE_LIMIT", "10M")
    data = json.loads(flashgen("doctor", "--json").stdout)
    able = {each["does"]: each for each in data["abilities"]}
    assert all(bool(each["by"]) != bool(each["missing"]) for each in able.values())
    assert able["search (`flashgen tune`)"]["by"].startswith("optuna")
    assert able["keep what was built"]["by"].endswith("of 10 MiB")
    assert {"nvcc", "PyTorch"} <= {tool["name"] for tool in data["tools"]}
    assert data["variables"]["FLASHGEN_CACHE_LIMIT"] == "10M"
    text = flashgen("doctor").stdout
    assert "what can be done here" in text and "FLASHGEN_CACHE_LIMIT=10M" in text


def test_doctor_says_what_is_missing(flashgen, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE_LIMIT", "much")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    able = {each["does"]: each for each in json.loads(flashgen("doctor", "--json").stdout)["abilities"]}
    assert "apt install g++" in able["emulate cards"]["missing"]
    assert "as in 500M or 4G" in able["keep what was built"]["missing"]


def test_cache(flashgen, tmp_path, monkeypatch):
    folder = tmp_path / "another cache"
    monkeypatch.setenv("FLASHGEN_CACHE", str(folder))
    assert f"{folder} holds 0 entries, 0 of 2048 MiB" in flashgen("cache").stdout.replace("\n", " ")
    key = "ab" + "0" * 62
    (folder / "ab").mkdir(parents=True)
    (folder / "ab" / f"{key}.cubin").write_bytes(b"x" * 2**20)
    data = json.loads(flashgen("cache", "--json").stdout)
    assert (data["entries"], data["num_bytes"], data["action"]) == (1, 2**20, "show")
    assert "removed 1 entry, 1 of 2048 MiB" in flashgen("cache", "clear").stdout.replace("\n", " ")
    assert not any(folder.rglob("*.cubin"))
    assert "'clean' is not one of 'show', 'clear'" in flashgen("cache", "clean", code=2).stderr


def test_errors_of_others_stay_what_they_are():
    """Some work their message out, and let nobody set it."""

    class Unset(Exception):
        message = property(lambda self: "nothing can be set here")

    with pytest.raises(Unset), _printable_errors():
        raise Unset
