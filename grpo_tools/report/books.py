"""Writes the section on the books of a run: what became of every group and token."""

from __future__ import annotations

from pathlib import Path

from grpo_components.exchange.books import close_books
from grpo_tools.report.run_files import Receipts, read_records
from grpo_tools.report.safe_text import escaped
from grpo_tools.report.tables import table
from grpo_tools.report.unread import Unread

_MAX_CHARS = 300
_ABOUT = (
    "What became of every group whose generation ended, over all attempts, and of every token that "
    "the policy sampled for them. Both sides are counted apart, so the residual is 0 only if "
    "nothing is missing."
)


def books_section(folder: Path, receipts: Receipts) -> str:
    """Return HTML with both sides of the books and their residual.

    Empty without receipts, and for those of older versions, which did not count every token.
    """
    points = [start["steps_done"] for start in receipts.starts]
    try:
        books = close_books(lambda name: read_records(folder / name, unread=Unread(folder)), points)
    except (OSError, ValueError) as error:
        problem = escaped(f"The books cannot be closed: {error}", _MAX_CHARS)
        return f'<p class="warn">{problem}</p>'
    if not books.known:
        return ""
    notes = "".join(f'<p class="about">{escaped(line, _MAX_CHARS)}</p>' for line in books.beside())
    problem = f'<p class="warn">{escaped(books.problem, _MAX_CHARS)}</p>' if books.problem else ""
    rows = table(("books", "groups", "tokens"), books.table())
    return f'<div class="box"><p class="about">{_ABOUT}</p>{rows}{problem}{notes}</div>'
