"""Whether a change of the templates' words leaves machine code alone.

    python tests/support/machine_code.py record /tmp/before.json     # on the tree as it was
    python tests/support/machine_code.py compare /tmp/before.json    # on the tree as it is; 1: it differs

Of the golden variants and the shipped kernels, or of those whose name contains a word given behind the file.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from flashgen.gen.families import family_named
from flashgen.gen.kernel import Kernel
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.gen.render import render

TESTS = Path(__file__).parents[1]
GOLDEN = TESTS / "gen" / "golden"
SHIPPED = TESTS.parent / "out" / "nvidia_h200"
#: What of a cubin's sections is machine code and what it reads; the rest names symbols and lines.
CODE_SECTIONS = (".text.", ".nv.constant", ".nv.shared.")


def kernels() -> Iterator[tuple[str, Kernel]]:
    """The golden variants, then the shipped kernels, by name."""
    for name, case in json.loads((GOLDEN / "cases.json").read_text()).items():
        variant = family_named(case["family"])(**case["variant"])
        yield name, render(variant, Problem(**case["problem"]), PRESETS[case["card"]])
    for path in sorted(SHIPPED.glob("*.json")):
        record = json.loads(path.read_text())
        limits = replace(PRESETS["h200"], name=record["device"])
        variant = family_named(record["family"]).from_dict(record["variant"])
        yield path.stem, render(variant, Problem.from_dict(record["problem"]), limits)


def machine_code(cubin: bytes) -> str:
    """Sixteen hex digits of a 64-bit ELF file's sections of code and constants."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * entry_bytes) for i in range(count)]
    names_offset = headers[names_index][4]
    digest = hashlib.sha256()
    for name_offset, kind, _, _, offset, size in headers:
        start = names_offset + name_offset
        name = cubin[start : cubin.index(b"\0", start)].decode()
        if name.startswith(CODE_SECTIONS):
            no_bits = 8
            digest.update(name.encode() + struct.pack("<Q", size))
            digest.update(b"" if kind == no_bits else cubin[offset : offset + size])
    return digest.hexdigest()[:16]


def compiled(words: list[str]) -> dict[str, str]:
    """Digests by name; what does not compile has its reason instead."""
    from flashgen.tuner.build.compile import cuda_toolchain
    from flashgen.tuner.errors import FlashgenError

    def digest_of(kernel: Kernel) -> str:
        try:
            built = cuda_toolchain(kernel.arch).build(kernel)
        except FlashgenError as refused:
            return f"{type(refused).__name__}: {refused}".splitlines()[0]
        return machine_code(built.artifact.read_bytes())

    chosen = [(name, kernel) for name, kernel in kernels() if not words or any(w in name for w in words)]
    with ThreadPoolExecutor(2) as pool:
        digests = pool.map(digest_of, (kernel for _, kernel in chosen))
        return {name: digest for (name, _), digest in zip(chosen, digests, strict=True)}


def main(action: str, path: str, *words: str) -> int:
    found = compiled(list(words))
    if action == "record":
        Path(path).write_text(json.dumps(found, indent=1))
        return 0
    before = json.loads(Path(path).read_text())
    differing = [name for name, digest in found.items() if before.get(name) != digest]
    for name in differing:
        print(f"{name}: {before.get(name, 'was not there')} before, {found[name]} now")
    print(f"{len(found) - len(differing)} of {len(found)} kernels compile to the same machine code")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
