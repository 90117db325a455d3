"""The tuned kernels on disk: ``out/<device>/<kernel>.{cu,py,json}``, and which of them serves a request.

The order of choice, which `find` documents to the user as well:

1. Data type, precision and head dims must agree, and the family where one is asked for. A kernel tuned for
   automatic precision serves that alone: what is asked for by name is what was tuned by that name.
2. Measured kernels come before predicted ones.
3. The same card comes before another of the same compute capability; any other card's kernel is not used.
4. A kernel tuned for few query rows, 16 at most, comes first where few are asked for, else one for many.
5. A kernel tuned under the same mask comes before one tuned under the other (a kernel serves both). One row
   sees all keys, whatever the mask.
6. Then the nearest in sequence lengths and in the number of heads over the batch, by ratio. Where no sizes
   were asked for: the last that was tuned here; of the shipped ones, the nearest to the default sizes.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from math import log2
from pathlib import Path
from typing import Any

from ...gen.families import family_named
from ...gen.kernel import Kernel
from ...gen.limits import DeviceLimits
from ...gen.problem import Problem
from ...gen.variant import Variant
from ..build.cache import write_atomically
from ..cards.slug import same_card
from ..errors import FlashgenError
from ..evaluate.outcome import Measurement, TunedKernel
from ..search.nearness import masks_differ, shape_distance


@dataclass(frozen=True)
class Paths:
    """The three files of one kernel."""

    cu: Path
    py: Path
    json: Path

    @classmethod
    def of(cls, folder: Path, slug: str, name: str) -> Paths:
        stem = folder / slug / name
        return cls(*(stem.with_name(f"{name}.{suffix}") for suffix in ("cu", "py", "json")))


@dataclass(frozen=True)
class Entry:
    """A kernel found in a library folder (``json_path``) or in a study (``rendered``)."""

    kernel: TunedKernel
    slug: str
    json_path: Path | None = None
    rendered: Kernel | None = None

    @property
    def predicted(self) -> bool:
        return self.kernel.measurement.predicted


@dataclass(frozen=True)
class Match:
    """The kernel chosen for a request and a sentence that says how; ``exact``: tuned for just that."""

    entry: Entry
    how: str
    exact: bool


def to_record(kernel: TunedKernel) -> dict[str, Any]:
    """All of a tuned kernel but its source, as JSON values."""
    return {
        "problem": kernel.problem.to_dict(),
        "family": kernel.variant.family,
        "variant": kernel.variant.to_dict(),
        "predicted": kernel.measurement.predicted,
        "measurement": kernel.measurement.to_dict(),
        "device": kernel.device,
        "arch": kernel.arch,
        "driver": kernel.driver,
        "toolkit": kernel.toolkit,
        "flashgen": kernel.flashgen,
        "seed": kernel.seed,
        "tuned_at": kernel.tuned_at,
    }


def figures(kernel: TunedKernel) -> dict[str, Any]:
    """What an emitted file tells of how its kernel was tuned: the measurement and what it was made with."""
    made_with = ("driver", "toolkit", "flashgen", "seed")
    return kernel.measurement.to_dict() | {name: getattr(kernel, name) for name in made_with}


def from_record(data: dict[str, Any], source: str) -> TunedKernel:
    """The kernel that `to_record` wrote. Raises KeyError, TypeError or ValueError for anything else."""
    return TunedKernel(
        problem=Problem.from_dict(data["problem"]),
        variant=family_named(data["family"]).from_dict(data["variant"]),
        source=source,
        measurement=Measurement.from_dict(data["measurement"]),
        device=data["device"],
        arch=data["arch"],
        driver=data["driver"],
        toolkit=data["toolkit"],
        flashgen=data["flashgen"],
        seed=data["seed"],
        tuned_at=data["tuned_at"],
    )


def check_writable(folder: Path) -> None:
    """Raises FlashgenError unless files can be written in ``folder``, which is made where it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise FlashgenError(
            f"the out folder {folder} cannot be written: {error.strerror or error}; choose another with --out"
        ) from error


def write(folder: Path, slug: str, kernel: TunedKernel, cuda: str, module: str) -> Paths:
    """Writes the kernel's three files (``cuda`` and ``module`` are the texts of the first two), each whole or
    not at all, the JSON, which makes the kernel known, last.

    Raises:
        FlashgenError: the folder cannot be written, or its disk is full.
    """
    paths = Paths.of(folder, slug, kernel.problem.name)
    try:
        paths.cu.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(paths.cu, cuda)
        write_atomically(paths.py, module)
        write_atomically(paths.json, json.dumps(to_record(kernel), indent=2) + "\n")
    except OSError as error:
        raise FlashgenError(
            f"{paths.cu.parent} cannot be written: {error.strerror or error}; the tuned kernel is kept with "
            "the trials: free some space or make the folder writable, then `flashgen emit best.cu` writes it"
        ) from error
    return paths


def read(path: Path, slug: str | None = None) -> Entry:
    """The kernel of one JSON file and the ``.cu`` beside it.

    Raises:
        FlashgenError: it cannot be read, or is not a tuned kernel's record.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        source = path.with_suffix(".cu").read_text(encoding="utf-8")
        return Entry(from_record(data, source), slug or path.parent.name, path)
    except OSError as error:
        raise FlashgenError(f"{error.filename or path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FlashgenError(
            f"{path} is not the record of a tuned kernel of this flashgen ({error}); remove it or tune again"
        ) from error


def shipped_folder() -> Path:
    """Where the kernels measured by flashgen's authors are installed."""
    return Path(str(files("flashgen.out")))


def folders(out: Path) -> list[Path]:
    """Where kernels are looked for, in order: the out folder, then the shipped ones."""
    found: dict[Path, Path] = {}
    for folder in (out, shipped_folder()):
        found.setdefault(folder.resolve(), folder)
    return list(found.values())


def entries(places: Iterable[Path]) -> list[Entry]:
    """Every readable kernel under ``places``, in their order. Files that are none are passed over."""
    found: list[Entry] = []
    for place in places:
        for path in sorted(place.glob("*/*.json")):
            try:
                found.append(read(path))
            except FlashgenError:
                continue
    return found


def last_tuned(known: Sequence[Entry]) -> Match | None:
    """The kernel tuned last; a measured one of the same card and problem before a prediction."""
    if not known:
        return None
    last = max(known, key=lambda e: e.kernel.tuned_at)
    if last.predicted:
        for entry in known:
            if (
                not entry.predicted
                and entry.kernel.problem == last.kernel.problem
                and same_card(entry.slug, last.slug)
            ):
                last = entry
    return Match(last, f"the last tuned: {_words(last)}", exact=True)


def find(
    known: Iterable[Entry],
    problem: Problem,
    limits: DeviceLimits,
    *,
    family: type[Variant] | None = None,
    any_shape: bool = False,
) -> Match | None:
    """The best known kernel for ``problem`` on the card, chosen as the module's text says, or None.

    ``any_shape``: batch, heads and lengths were not asked for; those of ``problem`` are the default ones.
    """
    shipped = shipped_folder().resolve()
    usable = [
        entry
        for entry in known
        if entry.kernel.problem.stem == problem.stem
        and (family is None or type(entry.kernel.variant) is family)
        and (same_card(entry.slug, limits.slug) or entry.kernel.arch == limits.arch)
    ]
    if not usable:
        return None

    def rank(entry: Entry) -> tuple[Any, ...]:
        tuned = entry.kernel.problem
        is_shipped = entry.json_path is not None and entry.json_path.resolve().is_relative_to(shipped)
        return (
            entry.predicted,
            not same_card(entry.slug, limits.slug),
            not any_shape and tuned.has_few_queries != problem.has_few_queries,
            masks_differ(tuned, problem),
            any_shape and is_shipped,
            0.0 if any_shape and not is_shipped else shape_distance(tuned, problem),
        )

    least = min(map(rank, usable))
    last = max((e for e in usable if rank(e) == least), key=lambda e: e.kernel.tuned_at)
    # Of several families, or runs with parameters held, that tuned for the very same: the fastest.
    same = [e for e in usable if (e.slug, e.kernel.problem) == (last.slug, last.kernel.problem)]
    entry = min(same, key=lambda e: (e.kernel.measurement.median_us, e is not last))
    predicted, other_card, _, other_mask, _, distance = least
    remarks = []
    if other_card:
        remarks.append(f"tuned on another card of sm_{limits.arch}, {entry.kernel.device}")
    if other_mask:
        remarks.append(f"tuned {'with' if entry.kernel.problem.causal else 'without'} the causal mask")
    if distance and not any_shape:
        remarks.append(f"tuned for {shape_words(entry.kernel.problem)}, asked for {shape_words(problem)}")
    how = _words(entry)
    if remarks:
        how = f"nothing was tuned for just this; the nearest match is {how} ({'; '.join(remarks)})"
    elif predicted:
        how = f"{how}; nothing was measured for it"
    return Match(entry, how, exact=not remarks)


def nearest_variants(
    known: Iterable[Entry],
    problem: Problem,
    limits: DeviceLimits,
    family: type[Variant],
    count: int = 2,
) -> list[Variant]:
    """Winners worth trying first: of family and dtype, nearest in card, head dims, precision, and then as
    `find` has it in rows, mask and shape."""

    def rank(entry: Entry) -> tuple[Any, ...]:
        tuned = entry.kernel.problem
        return (
            not same_card(entry.slug, limits.slug),
            abs(entry.kernel.arch - limits.arch),
            abs(log2(tuned.head_dim / problem.head_dim)) + abs(log2(tuned.head_dim_v / problem.head_dim_v)),
            tuned.precision != problem.precision,
            entry.predicted,
            tuned.has_few_queries != problem.has_few_queries,
            masks_differ(tuned, problem),
            shape_distance(tuned, problem),
        )

    same = [e for e in known if type(e.kernel.variant) is family and e.kernel.problem.dtype == problem.dtype]
    chosen = dict.fromkeys(e.kernel.variant for e in sorted(same, key=rank))
    return list(chosen)[:count]


def shape_words(problem: Problem) -> str:
    heads = str(problem.num_q_heads)
    if problem.num_kv_heads != problem.num_q_heads:
        heads += f"/{problem.num_kv_heads}"
    lengths = str(problem.seqlen_q)
    if problem.seqlen_k != problem.seqlen_q:
        lengths += f"x{problem.seqlen_k}"
    return f"batch {problem.batch}, heads {heads}, seqlen {lengths}"


def _words(entry: Entry) -> str:
    kind = "predicted" if entry.predicted else "measured"
    return f"{entry.kernel.problem.name} for {entry.kernel.device}, {kind}"
