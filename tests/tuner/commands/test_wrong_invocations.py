"""What people type wrong: each is one message that names the thing and the way out, never a traceback.

Some hundred and fifty of them, in a folder that holds a bit of everything; a few run by default.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from flashgen.tuner.bench import figures
from flashgen.tuner.printable import is_plain

from tests.support import hostile
from tests.support.depth import sampled

SIM = "--device sim:gtx-1080"
LADDER = "--preset gtx-1080 --d 32 --family ladder --set br=64"
#: Words typed, exit code (2 where the usage is wrong, 1 where something failed), and words of the message.
#: ``~`` is a name of 300 letters.
WRONG: list[tuple[str, int, str]] = [
    # the program
    ("tuen", 2, "No such command 'tuen'"),
    ("--verison", 2, "No such option"),
    ("list --jsn", 2, "No such option"),
    ("help", 2, "No such command 'help'"),
    # cards
    ("tune --device", 2, "requires an argument"),
    ("tune --device gpu", 2, "unknown device 'gpu'"),
    ("tune --device -1", 2, "'-1'"),
    ("tune --device ²", 2, "unknown device '²'"),
    ("tune --device \u0661", 2, "unknown device '\u0661'"),
    ("tune --device 0x0", 2, "unknown device '0x0'"),
    ("tune --device cuda:", 2, "unknown device 'cuda:'"),
    ("tune --device cuda:x", 2, "unknown device 'cuda:x'"),
    ("tune --device sim:", 2, "unknown"),
    ("tune --device sim:gtx-1081", 2, "did you mean 'gtx-1080'"),
    ("tune --device sim:../../etc", 2, "unknown"),
    ("tune --device 99999999999999999999999", 2, "unknown device"),
    (f"tune {SIM},,", 2, "unknown device ''"),
    (f"tune {SIM},sim:nope", 2, "nope"),
    ("space --device sim:nope", 2, "nope"),
    ("list --device nope", 2, "nope"),
    ("emit best.cu --preset sm_59", 2, "sm_59"),
    ("emit best.cu --preset 0", 2, "unknown preset '0'"),
    ("emit best.cu --preset h200 --device sim:h200", 2, "give one"),
    ("validate best.cu --device nope", 1, "best.cu does not read as a kernel"),
    ("ladder --device sim:nope", 2, "nope"),
    ("report --device nope --storage trials.sqlite3", 2, "nope"),
    # problems
    (f"tune {SIM} --dtype f61", 2, "unknown dtype 'f61'"),
    (f"tune {SIM} --dtype F32", 2, "unknown dtype 'F32'"),
    (f"tune {SIM} --dtype ,", 2, "dtype"),
    (f"tune {SIM} --dtype float32", 2, "unknown dtype 'float32'"),
    (f"tune {SIM} --precision tf23", 2, "unknown precision 'tf23'"),
    (f"tune {SIM} --dtype f16 --precision tf32", 2, "precision tf32 is one of f32"),
    (f"tune {SIM} --d 0", 2, "head_dim is 0; it must lie in 1..256"),
    (f"tune {SIM} --d -64", 2, "head_dim is -64"),
    (f"tune {SIM} --d 257", 2, "head_dim is 257; it must lie in 1..256"),
    (f"tune {SIM} --d 64.5", 2, "--d"),
    (f"tune {SIM} --d x", 2, "--d"),
    (f"tune {SIM} --d 64,", 2, "--d"),
    (f"tune {SIM} --d", 2, "requires an argument"),
    (f"tune {SIM} --dv 0", 2, "head_dim_v is 0"),
    (f"tune {SIM} --dv 300", 2, "head_dim_v is 300"),
    (f"tune {SIM} --batch 0", 2, "batch is 0"),
    (f"tune {SIM} --batch -1", 2, "batch is -1"),
    (f"tune {SIM} --batch {10**30}", 2, "batch is about 2^100"),
    (f"tune {SIM} --batch {'9' * 5000}", 2, "--batch"),
    (f"tune {SIM} --batch 1e3", 2, "--batch"),
    (f"tune {SIM} --batch 100000", 2, "no card holds more"),
    (f"tune {SIM} --heads {2**40}", 2, "num_q_heads is 1099511627776"),
    (f"tune {SIM} --heads 0", 2, "num_q_heads is 0"),
    (f"tune {SIM} --heads 12 --kv-heads 5", 2, "not a multiple of num_kv_heads 5"),
    (f"tune {SIM} --heads 4 --kv-heads 8", 2, "not a multiple of num_kv_heads 8"),
    (f"tune {SIM} --kv-heads 0", 2, "num_kv_heads is 0"),
    (f"tune {SIM} --seqlen 0", 2, "seqlen_q is 0"),
    (f"tune {SIM} --seqlen {2**64}", 2, "seqlen_q is about 2^65"),
    (f"tune {SIM} --seqlen-q -5", 2, "seqlen_q is -5"),
    (f"tune {SIM} --seqlen-k nan", 2, "--seqlen-k"),
    (f"tune {SIM} --seqlen 2147483647", 2, "no card holds more"),
    (f"tune {SIM} --suite lmm", 2, "unknown suite 'lmm'"),
    (f"tune {SIM} --suite llm --d 7", 2, "none of the"),
    ("list --suite nope", 2, "unknown suite 'nope'"),
    (f"emit best.py --preset h200 --batch {2**70}", 2, "batch is about"),
    (f"space {SIM} --seqlen {2**70}", 2, "seqlen_q is about"),
    (f"export x.json --storage trials.sqlite3 --heads {2**70}", 2, "num_q_heads is about"),
    # masks and scores
    (f"tune {SIM} --window x", 2, "--window 'x' is not how far a row sees"),
    (f"tune {SIM} --window 1,2,3,4", 2, "as in --window 127,0"),
    (f"tune {SIM} --window 127,", 2, "--window '127,'"),
    (f"tune {SIM} --window 127,0,all", 2, "--window '127,0,all'"),
    (f"tune {SIM} --window -2,0", 2, "window is (-2, 0); each side must lie in -1 (all keys)..1073741824"),
    (f"tune {SIM} --window 1073741825,0", 2, "window is (1073741825, 0); each side must lie in"),
    (f"tune {SIM} --window all,0,4", 2, "always is 4, but no window hides the first keys"),
    (f"tune {SIM} --chunk 0", 2, "chunk is 0; it must lie in 1..1073741824: leave --chunk out"),
    (f"tune {SIM} --chunk 1e3", 2, "--chunk '1e3' is no whole number"),
    (f"tune {SIM} --chunk 4294967296", 2, "chunk is 4294967296; it must lie in 1..1073741824"),
    (f"tune {SIM} --dilation -2", 2, "dilation is -2; it must lie in 1..1073741824"),
    (f"tune {SIM} --prefix 256", 2, "prefix is 256, but it widens a causal mask, and none is asked for"),
    (f"tune {SIM} --tree", 2, "rows have words of 64 bits, one for each row, but seqlen_q is 4096"),
    (f"tune {SIM} --prefix 256 --causal both", 2, "add --causal, or leave --prefix out"),
    (f"tune {SIM} --softcap 0", 2, "--softcap '0' is no positive number"),
    (f"tune {SIM} --softcap nan", 2, "--softcap 'nan' is no positive number"),
    (f"tune {SIM} --bias i8", 2, "a bias of 'i8' is not served; choose one of f32, f16, bf16, u8"),
    (f"tune {SIM} --buffer doc", 2, "--buffer 'doc' is not of the form name=value, as in --buffer doc=i16"),
    (f"tune {SIM} --buffer doc=i12", 2, "buffer doc is 'i12', which is not served; choose one of f32"),
    (f"tune {SIM} --buffer doc=i16", 2, "no expression reads buffer doc; leave it out"),
    (f"tune {SIM} --scalar n=4", 2, "no expression reads scalar n; leave it out"),
    (f"tune {SIM} --scalar n=4 --scalar n=5", 2, "--scalar n is 4 and 5; give it once"),
    (f"tune {SIM} --scalar n=inf", 2, "--scalar n is 'inf', no finite number"),
    (f"tune {SIM} --scalar n=4294967296", 2, "integers have 32 bits"),
    (f"tune {SIM} --scalar ../n=4", 2, "not of the form name=value"),
    (f"tune {SIM} --mask=", 2, "--mask is empty"),
    (f"tune {SIM} --suite llm --softcap 30", 2, "none of the 36 problems of suite 'llm' fits"),
    # families and parameters
    (f"tune {SIM} --family smit", 2, "did you mean 'simt'"),
    (f"tune {SIM} --family ~", 2, "unknown family"),
    ("list --family smit", 2, "did you mean 'simt'"),
    (f"tune {SIM} --set bq=64", 2, "no parameter 'bq'"),
    (f"tune {SIM} --set stage=2", 2, "did you mean 'stages'"),
    (f"tune {SIM} --set bc=7", 2, "bc=7 is not a choice; choose from"),
    (
        "tune --device sim:h200 --dtype bf16 --d 128 --backward --set br=81",
        2,
        "family wgmma-backward: br=81 is not a choice; choose from 64, 128, 80",
    ),
    (f"tune {SIM} --set bc", 2, "not of the form name=value"),
    (f"tune {SIM} --set =64", 2, "not of the form name=value"),
    (f"tune {SIM} --set bc=", 2, "not of the form name=value"),
    (f"tune {SIM} --set bc=64=64", 2, "bc=64=64"),
    (f"tune {SIM} --family ladder --set hoisted=maybe", 2, "hoisted=maybe"),
    (f"tune {SIM} --family simt --family ladder --set bc=64", 2, "--set holds parameters of one family"),
    (f"tune {SIM} --family simt --dtype f16", 1, "simt"),
    (f"tune {SIM} --dtype e4m3", 1, "no kernel family serves"),
    ("emit best.cu --set bc=64", 2, "--set needs a card"),
    ("emit best.cu --preset h200 --set bc=63", 2, "bc=63 is not a choice"),
    ("emit best.cu --preset gtx-1080 --d 256 --family ladder --set br=256 --set bc=64", 2, "allows 49152"),
    # options' values
    (f"tune {SIM} --trials 0", 2, "--trials"),
    (f"tune {SIM} --trials many", 2, "--trials"),
    (f"tune {SIM} --trials 1.5", 2, "--trials"),
    (f"tune {SIM} --minutes 0", 2, "--minutes"),
    (f"tune {SIM} --minutes -3", 2, "--minutes"),
    (f"tune {SIM} --minutes nan", 2, "--minutes"),
    (f"tune {SIM} --minutes inf", 2, "--minutes"),
    (f"tune {SIM} --minutes soon", 2, "--minutes"),
    (f"tune {SIM} --seed -1", 2, "--seed"),
    (f"tune {SIM} --seed {2**32}", 2, "--seed"),
    (f"tune {SIM} --jobs 0", 2, "--jobs"),
    (f"tune {SIM} --sampler best", 2, "sampler"),
    (f"tune {SIM} extra", 2, "extra"),
    ("ladder --limit nan", 2, "--limit"),
    ("ladder --limit 0", 2, "--limit"),
    (f"ladder {SIM} --cases t12", 2, "unknown case 't12'"),
    (f"ladder {SIM} --steps 9.9", 2, "unknown step '9.9'"),
    (f"ladder {SIM} --cases ,", 2, "no case was named"),
    (f"space {SIM} --limit -1", 2, "--limit"),
    ("replay space.xz --seeds 0", 2, "--seeds"),
    ("replay space.xz --evaluations 0", 2, "--evaluations"),
    ("replay space.xz --batch 0", 2, "--batch"),
    ("replay", 2, "Missing argument"),
    ("replay good.json", 1, "a recorded space in .xz or .gz"),
    ("replay none.xz", 1, "none.xz cannot be read"),
    ("replay junk.xz", 1, "junk.xz"),
    ("replay junk.xz --sampler nope", 2, "nope"),
    ("replay junk.xz --plot plot.txt", 1, "plot.txt ends in .txt"),
    ("bench nope", 2, "unknown suite 'nope'"),
    ("bench --shape nope", 2, "nope"),
    ("bench --contenders nope", 2, "unknown contender 'nope'"),
    ("bench --minutes nan", 2, "--minutes"),
    ("bench --from none.json", 1, "none.json cannot be read"),
    ("bench --from junk.json", 1, "junk.json"),
    ("bench --from folder", 1, "it is a folder"),
    ("bench --from /dev/zero", 1, "it is a device"),
    ("bench --from good.json --reference junk.json", 1, "junk.json"),
    ("bench --from good.json --readme notes.txt", 1, "notes.txt has no"),
    ("bench --from good.json --readme none.md", 1, "none.md cannot be read"),
    ("bench --from good.json --plots notes.txt", 1, "the plots folder notes.txt cannot be written"),
    ("bench --from good.json --to folder", 1, "folder"),
    ("bench llm --from good.json", 2, "--from shows a run as it is"),
    # targets
    ("emit", 2, "Missing argument"),
    (f"emit best.txt {LADDER}", 2, "name the file .cu (CUDA C++) or .py"),
    (f"emit best {LADDER}", 2, "cannot emit 'best'"),
    (f"emit . {LADDER}", 2, "cannot emit '.'"),
    (f"emit my-best.py {LADDER}", 2, "could not be imported"),
    (f"emit class.py {LADDER}", 2, "could not be imported"),
    (f"emit 1st.py {LADDER}", 2, "could not be imported"),
    (f"emit folder.cu {LADDER}", 2, "folder.cu is a folder"),
    (f"emit notes.txt/best.cu {LADDER}", 1, "notes.txt/best.cu cannot be written"),
    (f"emit full.cu {LADDER}", 1, "it is a device, no regular file"),
    (f"emit fifo.cu {LADDER}", 1, "it is a FIFO, no regular file"),
    (f"emit circle.cu {LADDER}", 1, "circle.cu cannot be written"),
    (f"emit ~.cu {LADDER}", 1, "cannot be written: File name too long"),
    (f"emit best.py --main {LADDER}", 2, "name a .cu file"),
    (f"emit best.py --cmake {LADDER}", 2, "name a .cu file"),
    (f"emit best.cu --embed {LADDER}", 2, "name a .py file"),
    (f"emit test.cu --cmake {LADDER}", 2, "cannot name a library"),
    ("emit best.py nope", 2, "there is no kernel 'nope'"),
    ("emit best.py f32_d40 --d 40", 2, "leave out what would choose them"),
    ("emit best.py f32_d40 f32_d48 --set br=64", 2, "--set renders one variant"),
    ("emit best.cu --d 40,48 --device sim:h200", 2, "name the file .py"),
    ("export x.json --format xml --storage trials.sqlite3", 2, "unknown format 'xml'"),
    ("export folder --storage trials.sqlite3", 1, "folder cannot be written: it is a folder"),
    ("export full.cu --storage trials.sqlite3", 1, "it is a device, no regular file"),
    ("export x.json --study nope --storage trials.sqlite3", 1, "has no study 'nope'"),
    ("export x.json --d 200 --storage trials.sqlite3", 1, "no study that was asked for"),
    ("report x.pdf --storage trials.sqlite3", 2, "name the file .html"),
    ("report folder.html --storage trials.sqlite3", 2, "folder.html is a folder"),
    ("report x.html --study nope --storage trials.sqlite3", 1, "nope"),
    ("report x.html --study a --d 64 --storage trials.sqlite3", 2, "--study names the problem"),
    ("record space.json --storage trials.sqlite3", 1, "a recorded space in .xz or .gz"),
    ("renew none", 2, "none has no record"),
    ("renew notes.txt", 2, "notes.txt has no record"),
    # storages
    ("list --storage none.sqlite3", 1, "none.sqlite3 does not exist"),
    ("list --storage none.journal", 1, "none.journal does not exist"),
    ("list --storage junk.json", 1, "junk.json"),
    ("list --storage folder", 1, "folder"),
    ("list --storage theirs.sqlite3", 1, "the database of another program"),
    ("list --storage junk.journal", 1, "junk.journal"),
    ("list --storage nope://x", 1, "cannot open the storage nope://x"),
    ("list --storage ://", 1, "cannot open the storage"),
    ("list --storage grpc://host", 1, "grpc"),
    ("list --storage sqlite://", 1, "nothing would be kept"),
    ("list --storage :memory:", 1, ":memory:"),
    (f"tune {SIM} --d 32 --storage full.journal", 1, "it is a device, no regular file"),
    (f"tune {SIM} --d 32 --out notes.txt", 1, "the out folder notes.txt cannot be written"),
    (f"tune {SIM} --d 32 --out /proc/none", 1, "the out folder /proc/none cannot be written"),
    (f"tune {SIM} --d 32 --out circle.cu", 1, "circle.cu"),
    ("report x.html --out none", 1, "there are no trials"),
    ("export x.json --out none", 1, "does not exist"),
    # files that are read
    ("import", 2, "Missing argument"),
    ("import none.json", 1, "none.json cannot be read: No such file"),
    ("import folder", 1, "folder cannot be read: it is a folder"),
    ("import fifo.cu", 1, "it is a FIFO"),
    ("import /dev/zero", 1, "it is a device"),
    ("import junk.json", 1, "junk.json cannot be imported"),
    ("import deep.json", 1, "deep.json cannot be imported: too deep"),
    ("import good.json", 1, "neither a Kernel Tuner cache nor T4"),
    ("diff f32_d40", 2, "Missing argument"),
    ("diff f32_d40 nope", 2, "there is no kernel 'nope'"),
    ("diff f32_d40 none.cu", 2, "none.json does not exist"),
    ("diff f32_d40 deep.json", 1, "deep.json is not the record"),
    ("validate", 2, "Missing argument"),
    ("validate none.py", 1, "none.py cannot be read"),
    ("validate notes.txt", 2, "neither a .py nor a .cu file"),
    ("validate folder.cu", 1, "folder.cu cannot be read: it is a folder"),
    ("validate fifo.cu", 1, "it is a FIFO"),
    ("validate full.cu", 1, "it is a device"),
    ("validate junk.py", 1, "junk.py does not read as a kernel"),
    ("validate best.cu --seed x", 2, "--seed"),
]


@pytest.fixture(scope="module")
def furnished(tmp_path_factory) -> Path:
    """A folder with a bit of everything, made once."""
    folder = tmp_path_factory.mktemp("furnished")
    for head_dim in (40, 48):
        hostile.write_kernel(folder / "out", head_dim=head_dim)
    hostile.write_study(folder / "trials.sqlite3")
    hostile.foreign_database(folder / "theirs.sqlite3")
    for name in ("junk.json", "junk.xz", "junk.journal", "junk.py", "notes.txt", "best.cu"):
        (folder / name).write_text("just some text\n")
    (folder / "deep.json").write_text(hostile.DEEP)
    (folder / "deep.cu").write_text("")
    names = ("device", "driver", "toolkit", "flashgen", "began")
    figures.write(folder / "good.json", figures.BenchRun(arch=90, **dict.fromkeys(names, "x")))
    for name in ("folder", "folder.cu", "folder.html"):
        (folder / name).mkdir()
    return folder


@pytest.mark.parametrize(("words", "code", "message"), sampled(WRONG, 24), ids=lambda value: str(value)[:60])
def test_what_is_typed_wrong_is_one_message(flashgen, furnished, tmp_path, words, code, message):
    shutil.copytree(furnished, tmp_path, dirs_exist_ok=True)
    for name in ("full.cu", "full.journal"):
        (tmp_path / name).symlink_to("/dev/full")
    (tmp_path / "circle.cu").symlink_to("circle.cu")
    os.mkfifo(tmp_path / "fifo.cu")
    before = names_in(tmp_path)
    result = flashgen(*words.replace("~", "n" * 300).split(), code=code)
    told = " ".join(result.stderr.replace("│", " ").split())
    assert message in told, told
    assert "Traceback" not in result.output and is_plain(result.stderr.replace("\n", ""))
    assert result.stdout == "" or result.stdout.startswith("Usage")
    left = {name for name in names_in(tmp_path) - before if not name.endswith(("-wal", "-shm"))}
    assert left <= {"out/tuning.sqlite3"}


def names_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_there_are_enough():
    assert len({words for words, _, _ in WRONG}) == len(WRONG) >= 150
