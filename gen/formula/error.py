"""What is wrong with a formula, and where in its text."""

from __future__ import annotations

#: How much of a long text is shown around the column that is wrong.
_SHOWN = 72


class FormulaError(ValueError):
    """A formula that cannot be read, or means nothing: ``reason``, at a ``column`` of the text, from 1."""

    def __init__(self, reason: str, text: str, column: int) -> None:
        self.reason, self.text, self.column = reason, text, column
        super().__init__(reason, text, column)

    def __str__(self) -> str:
        start = max(0, min(self.column - _SHOWN // 2, len(self.text) - _SHOWN))
        before, after = "..." * (start > 0), "..." * (start + _SHOWN < len(self.text))
        shown = "".join(each if each.isprintable() else "?" for each in self.text[start : start + _SHOWN])
        caret = " " * (len(before) + self.column - 1 - start) + "^"
        return f"column {self.column}: {self.reason}\n  {before}{shown}{after}\n  {caret}"
