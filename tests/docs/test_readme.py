"""README shows the recipe's own loops, links to what exists, and its picture shows a run."""

import re
import runpy
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import pytest
from lib.examples import PAGES, REPOSITORY, blocks
from lib.rows import write_rows

README = REPOSITORY / "README.md"
RECIPE = REPOSITORY / "recipes" / "async_grpo_full_finetune_distributed.py"
PICTURE = runpy.run_path(str(REPOSITORY / "docs" / "run_picture.py"))
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
CODE = re.compile(r"```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def anchors(page):
    """The anchors that GitHub gives the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        yield re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def test_readme_shows_the_loops_of_the_recipe():
    (code,) = (text for language, text in blocks(README) if language == "python")
    indented = re.sub(r"^(?=.)", "    ", code, flags=re.MULTILINE)
    assert indented + "\n    def setup(" in RECIPE.read_text()


def test_readme_names_every_config():
    names = {path.stem for path in (REPOSITORY / "recipes" / "configs").glob("*.yaml")}
    assert {name for name in names if f"`{name}`" not in README.read_text()} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_links_of_a_page_lead_somewhere(page):
    for name, anchor in LINK.findall(CODE.sub("", page.read_text())):
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), name
        assert not anchor or anchor in {*anchors(target)}, f"{name}#{anchor}"


def kinds_in(svg):
    return [each.get("class") for each in ElementTree.fromstring(svg).iter()]


def test_the_picture_has_the_groups_and_steps_of_its_time():
    """Step 3 of 4 is marked, with the group that it trained; the last group never ended."""
    at, role = {"attempt": 0}, {"role": "generator_0"}
    receipts = [{"event": "start", **at, "time": 0.0, "steps_done": 0}]
    for n in range(5):
        place = {"group": n, "prompt": n, "epoch": 0}
        receipts.append({"event": "issue", **at, **role, **place, "time": 1.1 * n})
        if n == 4:
            break
        step = {"step": n + 1, "trained_from": n, "policy_version": n + 1, "token_versions": {}}
        receipts += [
            {"event": "finish", **at, "time": n + 0.9, "group": n},
            {"event": "sample", **at, "time": n + 1.0, "step": n + 1, "groups": [n]},
            {"event": "publish", **at, "time": n + 1.9, "version": n + 1},
            {"event": "step", **at, **step, "time": n + 1.9},
            {"event": "load", **at, **role, "time": n + 2.2, "version": n + 1},
        ]
    share = {"rollout/success_rate": 0.5, "eval/prompts": 9}
    share |= {f"eval/success_rate{end}": 0.5 for end in ("", "_low", "_high")}
    with tempfile.TemporaryDirectory() as folder:
        write_rows(Path(folder) / "receipts.jsonl", *receipts)
        rows = ({"step": n, **at, **share} for n in range(5))
        write_rows(Path(folder) / "logs" / "metrics.jsonl", *rows)
        kinds = kinds_in(PICTURE["draw"](Path(folder), first_step=1))
    shown = {kind: kinds.count(kind) for kind in ("group", "group one", "step", "step one", "push")}
    assert shown == {"group": 3, "group one": 1, "step": 3, "step one": 1, "push": 3}


def test_the_picture_in_readme_is_a_small_svg():
    svg = (REPOSITORY / "docs" / "run.svg").read_text()
    assert "docs/run.svg" in README.read_text() and len(svg) < 40_000
    assert kinds_in(svg).count("group one") == 8 and "http" not in svg.partition(">")[2]
