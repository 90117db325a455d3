"""New keys and values that a call writes into the caches before it attends, rotated as queries are where
rotary embedding is asked for: by a launch of its own, in front of the others.

New rows of a sequence come behind the keys that it has there. A row is rotated by where it stands in its
sequence: columns come in pairs, each by an angle of its own, whose cosines and sines are read from tables.
Rotated queries go to memory of the caller's, from where the other launches read them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .launch import APPEND_ROLE, Launch
from .layout import Layout
from .operation import INPUT, ITEM_BYTES, Array

#: How columns pair: those of both halves of what is rotated, or neighbours.
HALVES, INTERLEAVED = "halves", "interleaved"
#: Threads of a block, of which each warp takes one row of one head at a time.
THREADS = 128
_ROTARY = re.compile(r"(halves|interleaved):(\d{1,4})")
#: What a kernel is told of the new rows, and of those that tables have.
NEW_ROWS, TOTAL_NEW, TABLE_ROWS = "seqlen_new", "total_new", "rotary_rows"
#: Where the new rows of packed sequences begin, and where rotated queries are put.
NEW_STARTS, ROTATED = "cu_seqlens_new", "rotated_q"


@dataclass(frozen=True)
class Append:
    """New keys and values are written into the caches; the first ``rotary_dim`` columns of keys and queries
    are rotated, as ``rotary`` pairs them: `HALVES`, `INTERLEAVED`, or empty for none.

    Raises:
        ValueError: a field is out of range; the message names the value and the range.
    """

    rotary: str = ""
    rotary_dim: int = 0

    def __post_init__(self) -> None:
        if self.rotary not in ("", HALVES, INTERLEAVED):
            raise ValueError(f"rotary is {self.rotary!r}; choose {HALVES} or {INTERLEAVED}, or '' for none")
        if bool(self.rotary) != bool(self.rotary_dim):
            raise ValueError(
                f"rotary is {self.rotary!r} of {self.rotary_dim} columns; give both, as {HALVES}:64, or none"
            )
        if self.rotary_dim % 2 or self.rotary_dim < 0:
            raise ValueError(f"rotary_dim is {self.rotary_dim}; columns come in pairs: give an even number")

    @classmethod
    def parsed(cls, rotary: str) -> Append:
        """Returns what a text such as ``halves:64`` asks for, without rotary embedding if it is empty. Raises
        ValueError for a text that is none."""
        if not rotary:
            return cls()
        found = _ROTARY.fullmatch(rotary)
        if found is None:
            raise ValueError(
                f"rotary {rotary!r:.80} is none; say how columns pair and how many are rotated, as in "
                f"{HALVES}:64 or {INTERLEAVED}:64"
            )
        return cls(found[1], int(found[2]))

    @property
    def text(self) -> str:
        """What `parsed` reads: ``halves:64``; empty without rotary embedding."""
        return f"{self.rotary}:{self.rotary_dim}" if self.rotary else ""

    @property
    def stem(self) -> str:
        """What a kernel is made for, as part of an identifier: ``_append_halves64``."""
        return f"_append_{self.rotary}{self.rotary_dim}" if self.rotary else "_append"

    @property
    def words(self) -> str:
        """The same in words."""
        rotated = f" and rotates {self.rotary_dim} columns ({self.rotary})" if self.rotary else ""
        return f"appends to its caches{rotated}"

    @property
    def options(self) -> list[str]:
        """The command-line options that ask for it."""
        return ["--append", *([f"--rotary {self.text}"] if self.rotary else [])]

    def why_not(self, dtype: str, head_dim: int, layout: Layout, *, latent: bool = False) -> str | None:
        """Says why arrays of that type, head dim and layout cannot be appended to so; None where they can."""
        if latent:
            return "latent caches are not appended to; write new rows into them before the call"
        if layout.is_packed and not layout.is_paged:
            return (
                "new keys are appended to caches, and packed keys have no room behind them; give a "
                "page_size, as many keys as a sequence has room for if each has a slot of its own"
            )
        if self.rotary_dim > head_dim:
            return f"rotary_dim is {self.rotary_dim}, but head_dim {head_dim}; rotate as many columns at most"
        if self.rotary and ITEM_BYTES[dtype] == 1:
            return f"rotary embedding of {dtype} is not served; rotate before queries and keys are rounded"
        return None

    def to_dict(self) -> dict[str, Any]:
        """Returns it as JSON has it."""
        return {"rotary": self.rotary, "rotary_dim": self.rotary_dim} if self.rotary else {}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Append:
        """Returns what ``to_dict`` wrote; unknown keys and values of other types raise TypeError."""
        known = {"rotary": str, "rotary_dim": int}
        for name, value in data.items():
            if type(value) is not known.get(name):
                raise TypeError(f"append's {name!r:.80} is {value!r:.80}")
        return cls(**data)

    @property
    def inputs(self) -> tuple[Array, ...]:
        """The new rows, as arrays of an operation."""
        return NEW_ARRAYS

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables of cosines and sines, (positions, rotary_dim / 2) by a stride of rows."""
        return ("rotary_cos", "rotary_sin") if self.rotary else ()

    def launch(self, main: Launch) -> Launch:
        """Returns the launch that does it: a warp for each row of each head."""
        return Launch(
            THREADS,
            0,
            None,
            role=APPEND_ROLE,
            packed=main.packed,
            rotates=bool(self.rotary),
        )


#: New keys and values: (batch, kv_heads, seqlen_new, head_dim), of packed sequences one behind the other.
NEW_ARRAYS = (
    Array("k_new", "num_kv_heads", NEW_ROWS, "head_dim", INPUT),
    Array("v_new", "num_kv_heads", NEW_ROWS, "head_dim_v", INPUT),
)


def rotated_strides(layout: Layout, num_q_heads: int, seqlen_q: int, head_dim: int) -> dict[str, int]:
    """Returns the strides of rotated queries by the names of the arguments for q's, in whose place they are:
    without gaps, heads side by side."""
    row = num_q_heads * head_dim
    strides = {"batch": seqlen_q * row, "head": head_dim, "row": row}
    return {f"q_stride_{axis}": strides[axis] for axis in layout.stride_axes}
