"""Markdown as the tests of the pages read it: headings, links, code, commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?:(?<=\n\n)|\A)((?: {4}.*\n)+)")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
INLINE = re.compile(r"`([^`\n]+)`")
HEADING = re.compile(r"^#{1,6} (.*)$", re.MULTILINE)
#: A generated part: ``<!-- parameters:simt -->`` ... ``<!-- /parameters -->``.
SECTION = r"(<!-- {kind}:{name} -->\n).*?(<!-- /{kind} -->)"


@dataclass(frozen=True)
class Page:
    """One Markdown file."""

    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def prose(self) -> str:
        """What stands outside of code blocks."""
        return INDENTED.sub("", FENCE.sub("", self.text))

    @cached_property
    def anchors(self) -> set[str]:
        """What a link may name behind `#`, as GitHub makes it of headings."""
        return {_slug(heading) for heading in HEADING.findall(FENCE.sub("", self.text))}

    @property
    def links(self) -> list[str]:
        return LINK.findall(INLINE.sub("", self.prose))

    @property
    def inline_code(self) -> list[str]:
        return INLINE.findall(self.prose)

    def fenced(self, language: str) -> list[str]:
        """Returns the code blocks of that language."""
        return [code for info, code in FENCE.findall(self.text) if info == language]

    def commands(self) -> Iterator[list[str]]:
        """Yields the words behind `flashgen` of each command line, of code blocks and in the text."""
        blocks = [*INDENTED.findall(FENCE.sub("", self.text)), *self.fenced("sh")]
        lines = [line.strip() for block in blocks for line in block.splitlines()]
        for line in [*lines, *self.inline_code]:
            for part in line.split(" && "):
                if re.match(r"(\.venv/bin/)?flashgen ", part) and not re.search(r"\.\.\.|<", part):
                    yield shlex.split(part, comments=True)[1:]


def _slug(heading: str) -> str:
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def replaced(text: str, kind: str, name: str, made: str) -> str:
    """Returns the text with what is generated between the markers of that kind and name put in."""
    pattern = SECTION.format(kind=kind, name=re.escape(name))
    new, count = re.subn(pattern, lambda found: f"{found[1]}{made}\n{found[2]}", text, flags=re.DOTALL)
    assert count == 1, f"{count} sections <!-- {kind}:{name} -->"
    return new
