"""Writes one page that overlays the curves of several runs."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_components.files import write_whole
from grpo_components.records.run_folder import CODE
from grpo_tools.report.better import verdicts
from grpo_tools.report.curves import metric_charts
from grpo_tools.report.facts import key_figures, read_facts
from grpo_tools.report.history import state_text
from grpo_tools.report.page import PageParts, clock, controls
from grpo_tools.report.run_files import read_config, read_run
from grpo_tools.report.safe_text import part, text

_MAX_NAME_CHARS, _MAX_VALUE_CHARS, _MAX_KEYS = 40, 100, 500


def write_comparison(folders: Sequence[Path], target: Path) -> tuple[Path, list[str]]:
    """Write a page with the curves of several runs; return its path, and which run is better."""
    folders = [*{folder.resolve(): folder for folder in folders}.values()]  # each once
    paths = [folder.resolve() for folder in folders]
    shared = os.path.commonpath([path.parent for path in paths])
    names = [text(path.relative_to(shared))[-_MAX_NAME_CHARS:] for path in paths]
    runs = [*map(read_run, folders)]
    metrics = [run.metrics for run in runs]
    figures = [
        {"state": state_text(run), **read_facts(run), **key_figures(run, "first and last steps")}
        for run in runs
    ]
    parts = PageParts()
    parts.sections["Runs"] = _table("", names, figures)
    configs = [*map(_config, folders)]
    if lines := verdicts(runs, names, configs):
        parts.sections["Which is better"] = part("about", "\n".join(lines))
    others = parts.metrics(metric_charts(*metrics, names=names))
    parts.sections["Differences in the configs"] = _differences(names, configs)
    parts.sections |= others
    page = parts.html(
        f"{len(folders)} runs",
        part("top", ", ".join(names), None, {}),
        controls(*metrics),
        " ".join(map(str, folders)),
        rollouts=[],
        answers=[],
        page={"clocks": [*map(clock, metrics)], "live": None},
    )
    write_whole(target, page)
    return target, lines


def _table(first: str, names: Sequence[str], columns: Sequence[Mapping[str, str]]) -> str:
    """Return an HTML table with a column for each run, and a row for each key of any run."""
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = [(key, *(column.get(key) for column in columns)) for key in keys]
    return part("box", (first, *names), rows)


def _config(folder: Path) -> dict[str, str]:
    """Return the values of a run's last config by dotted key, and a checksum of each code file.

    Empty without a config.
    """
    if (found := read_config(folder)) is None:
        return {}
    attempts = sorted((folder / CODE).glob("attempt_*"), key=lambda each: (len(each.name), each))
    files = [*attempts[-1].glob("*.py"), *attempts[-1].glob("*.diff")] if attempts else []
    code = {f"{CODE}/{f.name}": f"{zlib.crc32(f.read_bytes()):08x}" for f in sorted(files)}
    return dict(_flat("", found)) | code


def _flat(prefix: str, node: Any) -> list[tuple[str, str]]:
    if isinstance(node, dict) and node:
        items = [(f"{prefix}.{key}".lstrip("."), value) for key, value in node.items()]
        return [pair for key, value in items for pair in _flat(key, value)]
    return [(prefix, "null" if node is None else str(node))]


def _differences(names: Sequence[str], configs: Sequence[Mapping[str, str]]) -> str:
    """Return HTML with the config keys that do not have the same value in all runs."""
    keys = dict.fromkeys(key for config in configs for key in config)
    differing = [key for key in keys if len({config.get(key) for config in configs}) > 1]
    if not differing:
        return part("about", "The configs are the same.")
    shown = differing[:_MAX_KEYS]
    columns = [
        {key: text(config[key], _MAX_VALUE_CHARS) for key in shown if key in config}
        for config in configs
    ]
    return _table("key", names, columns)
