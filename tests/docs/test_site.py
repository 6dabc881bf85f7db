"""The guides build as a site without a broken link, and look there as they do on GitHub."""

import re
import runpy

import pytest
from lib.examples import PAGES, REPOSITORY
from mkdocs.commands.build import build
from mkdocs.config import load_config

PARAGRAPH = re.compile(r"<p>(.*?)</p>", re.DOTALL)
UNRENDERED = re.compile(r"^(?:[-*] |1\. |\||```)", re.MULTILINE)
"""A list, code block or table that Python-Markdown takes for text."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(REPOSITORY / "mkdocs.yml"), site_dir=str(folder), strict=True))
    return folder


def test_the_site_has_every_page(site):
    pages = [page for page in PAGES if page.parent != REPOSITORY]
    names = {page.relative_to(REPOSITORY / "docs").with_suffix("") for page in pages}
    built = {page.relative_to(site).parent for page in site.rglob("index.html")}
    assert {str(name).removesuffix("index") for name in names} == {
        str(name).removesuffix(".") for name in built
    }


def test_lists_and_tables_of_the_site_are_rendered(site):
    for page in site.rglob("*.html"):
        found = [text for text in PARAGRAPH.findall(page.read_text()) if UNRENDERED.search(text)]
        assert not found, f"{page.relative_to(site)}: {found[0]}"


def test_the_pictures_of_concepts_are_those_of_their_script(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "docs")
    runpy.run_path(str(REPOSITORY / "docs" / "concept_pictures.py"))["main"](tmp_path)
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    folder = REPOSITORY / "docs" / "pictures"
    assert drawn == {path.name: path.read_text() for path in folder.iterdir()}
    assert all(len(svg) < 40_000 for svg in drawn.values())
