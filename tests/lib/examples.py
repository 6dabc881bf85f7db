"""Extracts the examples of the documentation: files to write, and commands to run."""

import re
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "CONTRIBUTING.md",
    *sorted((REPOSITORY / "docs").rglob("*.md")),
]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"(WANDB_MODE=|tune |python |for )")
NAMED = re.compile(r"# (my_\w+\.py)\n")
PLACEHOLDER = re.compile(r"OUTPUT_DIR|<[a-z]")
"""Something the reader has to fill in."""


@dataclass(frozen=True)
class Example:
    """A block of shell commands of one page."""

    page: str
    number: int
    text: str

    @property
    def complete(self) -> bool:
        return not PLACEHOLDER.search(self.text)


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return language and text of each fenced block."""
    return FENCED.findall(page.read_text())


def files(page: Path) -> dict[str, str]:
    """Return name -> text of the Python files that a page asks its reader to write."""
    texts = [text for language, text in blocks(page) if language == "python"]
    return {named[1]: text for text in texts if (named := NAMED.match(text))}


def examples(page: Path) -> list[Example]:
    texts = [text for language, text in blocks(page) if not language and COMMANDS.match(text)]
    return [Example(page.name, number, text) for number, text in enumerate(texts, start=1)]
