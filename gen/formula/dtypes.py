"""What array libraries call their types, and which of them buffers have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..expression import Kind

#: The buffers' dtypes by the names of array libraries. Truths are bytes.
BUFFER_DTYPES: Mapping[str, str] = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
    "bool": "u8",
}
_NAME = re.compile(r"bfloat16|float\d*|double|half|uint\d+|int\d*|long|short|bool")


def dtype_name(dtype: Any) -> str:
    """Returns the name of a library's dtype, or of Python's type: ``float32``. Raises ValueError."""
    if isinstance(dtype, Kind):
        return str(dtype)
    found = _NAME.search(getattr(dtype, "__name__", None) or str(dtype))
    if found is None:
        raise ValueError(f"{dtype} is no type of numbers or truths")
    return found.group()


def kind_of(dtype: Any) -> Kind:
    """Returns the kind of a library's dtype, or of Python's type. Raises ValueError."""
    name = dtype_name(dtype)
    if name == "bool":
        return Kind.BOOL
    return Kind.INT if name.startswith(("int", "uint", "long", "short")) else Kind.FLOAT
