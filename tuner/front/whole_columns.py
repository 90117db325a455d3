"""Head dims that eight does not divide: tensors are filled up with columns of zeros where that pays.

Rows of such head dims begin anywhere in memory: no access of 16 bytes finds them, nor can the copy engine
step by them. Columns of zeros change no score; those that they make of outputs are left out again.
"""

from __future__ import annotations

from typing import Any

from .attend import Call

#: Columns that 16 bytes of 16-bit numbers hold; kernels of float32 by parts ask for as many.
WHOLE = 8
#: Rows of queries and of keys from which on copying costs less than what kernels save.
LEAST_ROWS = 256


def filled_up(torch: Any, call: Call) -> Call | None:
    """Returns the call of tensors that are filled up; None for those that are whole, that are too short for
    copies to pay, or whose outputs and streams are the caller's. Autograd takes the gradients back."""
    columns, columns_v = call.q.shape[-1], call.v.shape[-1]
    if columns % WHOLE == 0 == columns_v % WHOLE:
        return None
    rows = 1 if call.layout == "bshd" else 2
    if call.out is not None or call.stream is not None or call.scales is not None:
        return None
    if len(call.q.shape) != 4 or len(call.k.shape) != 4 or call.k.shape[-1] != columns:
        return None
    if min(call.q.shape[rows], call.k.shape[rows]) < LEAST_ROWS:
        return None

    def whole(x: Any) -> Any:
        return torch.nn.functional.pad(x, (0, -x.shape[-1] % WHOLE)) if x.shape[-1] % WHOLE else x

    scale = columns**-0.5 if call.scale is None else call.scale
    return call._replace(q=whole(call.q), k=whole(call.k), v=whole(call.v), scale=scale)


def first_columns(made: Any, columns: int, return_lse: bool) -> Any:
    """Returns outputs without the columns behind so many, as a view; a log-sum-exp beside as it is."""
    if return_lse:
        return made[0].narrow(-1, 0, columns), made[1]
    return made.narrow(-1, 0, columns)
