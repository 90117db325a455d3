"""CUDA C++ with coloured syntax, for light and dark pages."""

from __future__ import annotations

import re

from markupsafe import Markup

#: Pygments' styles for light and dark pages.
LIGHT_STYLE, DARK_STYLE = "default", "github-dark"


def highlighted(source: str) -> Markup:
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import CudaLexer  # pyright: ignore[reportAttributeAccessIssue]

    return Markup(highlight(source, CudaLexer(), HtmlFormatter(nowrap=True)))


def code_style() -> str:
    """Returns Pygments' rules for light pages, and for dark ones. The page's own background stays."""
    from pygments.formatters import HtmlFormatter

    def rules(style: str) -> str:
        text = HtmlFormatter(style=style).get_style_defs(".code")
        lines = [line for line in text.splitlines() if re.match(r"\.code \.\w+ {", line)]
        return "\n".join(
            re.sub(r"/\*.*?\*/|background-color: [^;}]+;?|border: [^;}]+;?", "", x) for x in lines
        )

    dark = "(prefers-color-scheme: dark)"
    return (
        f"@media not all and {dark} {{\n{rules(LIGHT_STYLE)}\n}}\n@media {dark} {{\n{rules(DARK_STYLE)}\n}}"
    )
