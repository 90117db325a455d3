"""Which names of buffers and scalars a kernel can have."""

from __future__ import annotations

import re
from collections.abc import Collection
from itertools import chain, count

_IDENTIFIER = re.compile(r"[A-Za-z]\w{0,39}", re.ASCII)
_WORDS_OF_C = """
    alignas alignof and and_eq args asm auto bitand bitor bool break case catch char class compl
    const consteval constexpr constinit continue decltype default delete do double dynamic_cast else
    enum explicit export extern false float for friend goto half if inline int long mutable
    namespace new noexcept not not_eq nullptr operator or or_eq private protected public register
    return short signed sizeof static struct switch template this throw true try typedef typename
    union unsigned using virtual void volatile while xor xor_eq
"""
_WORDS_OF_PYTHON = """
    and as assert async await class def del elif except finally from global import in is lambda nonlocal not
    or pass raise while with yield None True False
"""
_KEYWORDS = frozenset((_WORDS_OF_C + _WORDS_OF_PYTHON).split())
_WORDS_OF_KERNELS = """
    b h q k v o row key lse scale score batch lane warp causal layout stream out seqlen_q seqlen_k num_q_heads
    num_kv_heads value_scale return_lse window_left window_right always_keys chunk dilation softcap tile_lists
    tile_lists_made plan plan_made cu_seqlens_q cu_seqlens_k seqused_q seqused_k total_q total_k
    page_table page_table_stride num_pages page_size max_pages workspace dout dlse dq dk dv
"""
#: Names that stand for something else in a kernel or in a module's call.
TAKEN = frozenset(_WORDS_OF_KERNELS.split())


def is_identifier(name: str) -> bool:
    """Returns whether a buffer or scalar can have this name: one of C++ and of Python's, not too long."""
    return _IDENTIFIER.fullmatch(name) is not None and name not in _KEYWORDS


def fresh_identifier(hint: str, taken: Collection[str]) -> str:
    """Returns a name that a buffer or scalar can have and that is not ``taken``, as like to ``hint`` as can
    be."""
    stem = re.sub(r"\W+", "_", hint, flags=re.ASCII).strip("_").lstrip("0123456789_")[:32] or "array"
    names = (f"{stem}_{number}" if number else stem for number in chain([0], count(2)))
    return next(each for each in names if is_identifier(each) and each not in taken and each not in TAKEN)
