"""What flash-attn's arguments say, in flashgen's words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...templates.runtime.arrays import _torch_of
from ..front.libraries import count, library_of, number_of_run


@dataclass(frozen=True)
class FlashWords:
    """What the functions of every version of flash-attn are told alike.

    A side of ``window_size`` that is negative or None is unlimited; with ``causal`` the right one is 0,
    whatever it says. ``softcap`` is none where it is not above 0, ``attention_chunk`` where it is 0.
    """

    softmax_scale: float | None = None
    causal: bool = False
    window_size: Sequence[int | None] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Any = None
    sinks: Any = None
    attention_chunk: int = 0
    version: int = 2

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """How many keys are seen before a row's place and after it; None: all."""
        left, right = (None if side is None or side < 0 else int(side) for side in self.window_size)
        return left, 0 if self.causal else right

    def is_limited(self, rows: int, keys: int) -> bool:
        """Tells whether flash-attn counts a call of at most so many rows and keys among those with a mask of
        places, by which it rotates queries: also by a side that hides nothing, if it is not as long as all
        that version 2 has keys, version 3 keys before the last row and rows behind the first."""
        left, right = self.sides
        most_left, most_right = (keys, keys) if self.version == 2 else (keys - 1, rows - 1)
        return (
            self.causal
            or (left is not None and left < most_left)
            or (right is not None and right < most_right)
            or self.attention_chunk > 0
        )

    def asked(self, rows: int, keys: int) -> dict[str, Any]:
        """Returns what `flashgen.attention` is asked for, of at most so many rows and keys: sides of a window
        that hide nothing there are not named."""
        left, right = self.sides
        if left is not None and left >= keys - 1:
            left = None
        # Version 2 calls a side unlimited that is as long as all keys, even of rows far before them.
        if right is not None and (right >= rows - 1 or (self.version == 2 and right >= keys > 0)):
            right = None
        window = tuple(-1 if side is None else side for side in (left, right))
        told = {
            "causal": right == 0,
            "window": None if left is None and not right else window,
            "softcap": float(self.softcap) if self.softcap and self.softcap > 0 else None,
            "alibi_slopes": self.alibi_slopes,
            "sinks": self.sinks,
            "chunk": self.attention_chunk or None,
            "scale": self.softmax_scale,
        }
        return {name: value for name, value in told.items() if value is not None}

    # ---- log-sum-exps as flash-attn 2 has them

    def lse_of_flash2(self, lse: Any, keys: int, shift: Callable[[Any], Any]) -> Any:
        """Returns log-sum-exps as flash-attn 2 writes them: +inf of rows that see nothing, and under a causal
        mask without a window from scores that have ALiBi's slope times the key's number added.

        ``lse`` is (..., heads, rows), ``keys`` the most there may be; ``shift`` returns the slopes that it is
        told times the rows' places among the keys, which broadcasts to ``lse``.
        """
        library = library_of("q", lse)
        left, right = self.sides
        if self.alibi_slopes is not None and right == 0 and (left is None or left >= keys):
            lse = lse + shift(self.alibi_slopes)
        nothing = lse == -library.inf
        return library.where(nothing, library.inf, lse)


def shift_in_batch(slopes: Any, like: Any, rows: int, keys: Any) -> Any:
    """Returns slopes, (heads) or (batch, heads), times the places of a batch's rows among the keys, the last
    row at the last key: (heads, rows) or (batch, heads, rows).

    ``keys`` is their number, or an array (batch).
    """
    offset = keys - rows if isinstance(keys, int) else (keys - rows)[:, None, None]
    return slopes[..., None] * (count(like, rows) + offset)


def shift_in_sequences(slopes: Any, total: int, cu_seqlens_q: Any, keys: Any) -> Any:
    """Returns slopes, (heads) or (batch, heads), times the places of packed rows among the keys of their
    sequences, (heads, total), where ``keys`` (batch) says how many each has."""
    places = count(cu_seqlens_q, total)
    of = number_of_run(cu_seqlens_q[1:], places)
    of_rows = slopes[:, None] if len(slopes.shape) == 1 else slopes[of].T
    return of_rows * (places - cu_seqlens_q[1:][of] + keys[of])


def check_dropout(dropout_p: float) -> None:
    """Raises ValueError where something is to be dropped."""
    if dropout_p:
        raise ValueError(
            f"dropout_p is {dropout_p}, and flashgen's kernels drop nothing: pass 0, or drop outputs instead"
        )


def check_deterministic(deterministic: bool, *arrays: Any) -> None:
    """Raises ValueError where gradients are wanted with the same bits in every run, and PyTorch was not told
    so: the backward pass asks PyTorch."""
    torch = _torch_of(arrays[0])
    if not deterministic or torch is None or torch.are_deterministic_algorithms_enabled():
        return
    if torch.is_grad_enabled() and any(array.requires_grad for array in arrays):
        raise ValueError(
            "deterministic=True is asked for each backward pass by itself here: call "
            "torch.use_deterministic_algorithms(True) and leave it on until then"
        )
