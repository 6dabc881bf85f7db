"""The reference has every config key and metric, and every file that a run writes into its logs."""

import dataclasses
import re
import runpy

from lib.examples import REPOSITORY

from grpo_components.objective.losses import LossInputs
from grpo_components.training.token_metrics import ALWAYS_LOGGED

DOCS = REPOSITORY / "docs"
REFERENCE = (DOCS / "reference.md").read_text()
SOURCES = sorted((REPOSITORY / "grpo_components").rglob("*.py"))
FAMILIES = "rollout|staleness|buffer|loss|ratio|mismatch|off_policy|time|push|throughput|memory"
FAMILIES += "|eval|curriculum|reuse|agents|teacher"


def test_the_page_of_keys_is_up_to_date():
    page = runpy.run_path(str(DOCS / "keys_page.py"))["page"]()
    assert page == (DOCS / "keys.md").read_text(), "run python docs/keys_page.py docs/keys.md"


def test_every_metric_is_in_the_reference():
    """Short forms such as `_p50` belong to the metric before them."""
    text = "".join(path.read_text() for path in SOURCES)
    found = {*re.findall(rf'"((?:{FAMILIES})/[a-z_0-9]+)"', text), *ALWAYS_LOGGED}
    missing = {
        name
        for name in found
        if f"`{name}`" not in REFERENCE and f"`_{name.rpartition('_')[2]}`" not in REFERENCE
    }
    assert len(found) >= 60 and missing == set()


def test_every_input_of_a_loss_is_on_the_page_of_objectives():
    page = (DOCS / "objectives.md").read_text()
    names = "anchor_logprobs", *(field.name for field in dataclasses.fields(LossInputs))
    assert [name for name in names if f"`{name}`" not in page] == []


def test_every_log_is_in_the_reference():
    text = "".join(path.read_text() for path in SOURCES)
    logs = set(re.findall(r'logs / "(\w+\.(?:jsonl|log))"', text))
    assert len(logs) >= 5 and {name for name in logs if f"logs/{name}`" not in REFERENCE} == set()
