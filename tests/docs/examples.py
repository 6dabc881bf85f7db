"""The examples that the documentation prints: files to copy, and commands to run."""

import re
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "CONTRIBUTING.md",
    *sorted((REPOSITORY / "docs").glob("*.md")),
]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"(WANDB_MODE=|tune |python |for )")
NAMED = re.compile(r"# (my_\w+\.py)\n")
LEFT_OPEN = re.compile(r"OUTPUT_DIR|<[a-z]")
"""The reader's own: a folder, a seed."""


@dataclass(frozen=True)
class Example:
    """Shell commands of one page, as printed."""

    page: str
    number: int
    text: str

    @property
    def complete(self) -> bool:
        """Whether they run as they are."""
        return not LEFT_OPEN.search(self.text)


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of each fenced block."""
    return FENCED.findall(page.read_text())


def files(page: Path) -> dict[str, str]:
    """The Python files that a page says to write, by name."""
    texts = [text for language, text in blocks(page) if language == "python"]
    return {named[1]: text for text in texts if (named := NAMED.match(text))}


def examples(page: Path) -> list[Example]:
    """The page's blocks of commands, in order."""
    texts = [text for language, text in blocks(page) if not language and COMMANDS.match(text)]
    return [Example(page.name, number, text) for number, text in enumerate(texts, start=1)]
