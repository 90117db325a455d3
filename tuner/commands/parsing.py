"""How commands parse what is typed, and what their help shows of options; imports nothing of theirs."""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand

#: What ``--causal both`` is turned into, since a flag takes no word.
BOTH_MASKS = "--both-masks"
#: What ``--bias`` is turned into where no type follows; and what may be meant as one.
OWN_BIAS, DTYPE_LIKE = "--bias=own", re.compile(r"[a-z]{1,5}\d{1,2}")


class Command(TyperCommand):
    """A command whose flag ``--causal`` may be followed by the word ``both``, and whose ``--bias`` by a type
    or by nothing; its help shows no types of Python's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        kept: list[str] = []
        for word, after in zip(args, [*args[1:], ""], strict=False):
            if word == "both" and kept[-1:] == ["--causal"]:
                kept[-1] = BOTH_MASKS
            elif word == "--bias" and not DTYPE_LIKE.fullmatch(after):
                kept.append(OWN_BIAS)
            else:
                kept.append(BOTH_MASKS if word == "--causal=both" else word)
        return super().parse_args(ctx, kept)

    def get_params(self, ctx: Any) -> Any:
        return [plain(parameter) for parameter in super().get_params(ctx)]


def plain(parameter: Any) -> Any:
    """A command's parameter that help shows by its own name for its values, never by Python's types."""
    if getattr(parameter, "is_flag", False) and parameter.metavar is None:
        parameter.metavar = ""
    if parameter.param_type_name == "argument":
        parameter.display_type_rich = lambda ctx: ""
    return parameter
