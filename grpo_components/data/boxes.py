"""Finds the boxed answer of a solution or a response."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")


def last_boxed(text: str) -> str:
    """Return the content of the last complete `\\boxed{...}`; empty if there is none."""
    for piece in reversed(_BOX.split(text)[1:]):
        if not piece.startswith("{"):
            unbraced = re.match(r"-?\w(?:[\w.,/]*\w)?", piece)  # `\boxed 5`, as in MATH
            if unbraced:
                return unbraced[0]
            continue
        depth = 0
        for match in re.finditer(r"\\.|[{}]", piece, re.DOTALL):  # `\{` is text, not a LaTeX brace
            depth += (match[0] == "{") - (match[0] == "}")
            if depth == 0:
                if content := piece[1 : match.start()].strip():
                    return content
                break
    return ""
