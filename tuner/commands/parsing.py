"""How commands parse what is typed, and what their help shows of options; imports nothing of theirs."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

#: What ``--causal both`` is turned into, since a flag takes no word.
BOTH_MASKS = "--both-masks"


class Command(TyperCommand):
    """A command whose flag ``--causal`` may be followed by the word ``both``; its help shows no types."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        kept: list[str] = []
        for word in args:
            if word == "both" and kept[-1:] == ["--causal"]:
                kept[-1] = BOTH_MASKS
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
