"""Values as Python source, laid out as a formatter would lay them out."""

from __future__ import annotations

import ast
import base64
import json
import zlib
from collections.abc import Mapping
from typing import Any


def source_literal(source: str) -> str:
    """Returns ``source`` as a Python string literal, raw wherever that yields exactly the same text."""
    for quote in ('"""', "'''"):
        literal = f"r{quote}{source}{quote}"
        if quote not in source and "\r" not in source and _evaluates_to(literal, source):
            return literal
    return repr(source)


def to_literal(data: Mapping[str, Any]) -> str:
    """Returns a mapping as Python source, an entry a line, also of mappings in it."""
    if not data:
        return "{}"
    lines = []
    for key, value in data.items():
        text = to_literal(value) if isinstance(value, Mapping) else value_literal(value)
        lines.append(f"{json.dumps(key)}: {text},\n".replace("\n", "\n    ").removesuffix("    "))
    return "{\n" + "".join(f"    {line}" for line in lines) + "}"


def packed_literal(data: bytes) -> str:
    """Returns bytes, packed, as the literal of a text; an emitted module unpacks them."""
    return json.dumps(base64.b85encode(zlib.compress(data, 9)).decode())


def value_literal(value: Any) -> str:
    """Returns a scalar, a list or a tuple as a formatter would write it: strings in the quotes that need
    fewer escapes."""
    if isinstance(value, list):
        return f"[{', '.join(map(value_literal, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(value_literal, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, str) and value.count('"') <= value.count("'"):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)


def _evaluates_to(literal: str, text: str) -> bool:
    try:
        return ast.literal_eval(literal) == text
    except (SyntaxError, ValueError):
        return False
