"""Checks the text of a config before it is parsed: nesting, sizes, numbers, interpolation."""

from __future__ import annotations

import argparse
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from grpo_components.errors import fail, shown

MAX_BYTES = 2**18
"""Maximum size of a config file or of one override; the longest shipped config has 8 KiB."""
MAX_DEPTH = 20
"""Maximum nesting of mappings and lists; parsers recurse, and crash at some thousand levels."""
MAX_EXPANDED = 2**20
"""Maximum characters of a text with interpolations replaced; other values count 1 each."""
MAX_BITS = 1023
"""Maximum bits of a whole number; longer ones overflow a float or may be too long to print."""
_INTERPOLATION = re.compile(r"\$\{([\w.\[\]-]+)\}")
_NULLS = ("None", "null", "~")
_NESTING = f"at most {MAX_DEPTH} levels"


def check_command(argv: Sequence[str]) -> None:
    """Check the config file and the overrides of a command line, without parsing their values."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--config")
    try:
        known, overrides = parser.parse_known_args(argv)
    except argparse.ArgumentError:
        return  # torchtune's parser will refuse it and print its usage
    text = None if known.config is None else _read(known.config)
    if text is not None:
        check_yaml(text)
    for override in overrides:
        key, _, value = override.partition("=")
        if len(override) > MAX_BYTES:
            fail(key, f"{len(override)} characters given", f"at most {MAX_BYTES}")
        if key.count(".") + key.count("[") >= MAX_DEPTH:
            levels = 1 + key.count(".") + key.count("[")
            fail(key, f"an override {levels} levels deep", _NESTING)
        check_yaml(value, key.lstrip("~"))
        if text is not None and (key.startswith("~") or value in _NULLS):
            _check_removal(text, key)


def _check_removal(text: str, key: str) -> None:
    """Refuse to remove what cannot be removed: a component by `~`, or a reward that is not there.

    A reward is removed by null, see `read_settings`.
    """
    try:
        config = yaml.safe_load(text)
    except (ValueError, yaml.YAMLError):  # such as a date that does not exist: text in OmegaConf
        return
    if not isinstance(config, dict):
        return
    path = key.removeprefix("~").removesuffix("._component_")
    section, _, name = path.rpartition(".")
    if not key.startswith("~"):
        rewards = config.get("rewards")
        names = list(map(str, rewards)) if isinstance(rewards, Mapping) else [name]
        if section == "rewards" and name not in names:
            fail(path, "null given, and the config has no such reward", ", ".join(names))
        return
    node, around = _at(config, path), _at(config, section) if section else config
    if isinstance(node, Mapping) and "_component_" in node:
        fail(key, "~ removes no component", f"{path}=null")
    if not (isinstance(around, Mapping) and name in around):
        fail(key, "the config has no such key", "a key of the config")


def _read(path: str) -> str | None:
    try:
        mode = Path(path).stat().st_mode
        if stat.S_ISFIFO(mode):
            return None  # a pipe, as in `--config <(...)`, can be read only once
        if not stat.S_ISREG(mode):
            fail("--config", f"{path} is not a file", "a YAML file, or a name that `tune ls` shows")
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        text = data.decode("utf-8")
    except OSError as error:
        problem = f"{path} cannot be read: {error.strerror}"
        fail("--config", problem, "a YAML file, or a name that `tune ls` shows")
    except ValueError as error:  # a null byte in the path, or not UTF-8
        fail("--config", f"{path} is not text: {error}", "a YAML file in UTF-8")
    if len(data) > MAX_BYTES:
        fail("--config", f"{path} has more than {MAX_BYTES} bytes", "a shorter file")
    return text


@dataclass
class _Level:
    """A mapping or list that was entered and not yet left."""

    name: str
    is_mapping: bool
    anchor: str | None
    next_key: str | None = None
    """In a mapping: the key whose value comes next."""
    items: int = 0
    height: int = 1
    """Number of levels from this one down to the deepest inside it."""


@dataclass
class _Reader:
    """Tracks keys and nesting through the events of one YAML document."""

    root: str
    loader: Any
    levels: list[_Level] = field(default_factory=list)
    heights: dict[str, int] = field(default_factory=dict)
    """Number of levels of each complete node that has an anchor, by anchor."""

    def here(self) -> str:
        """Return the dotted key of the next node."""
        names = [self.root, *(level.name for level in self.levels[1:])]
        if self.levels:
            top = self.levels[-1]
            names.append(str(top.next_key or "") if top.is_mapping else str(top.items))
        return ".".join(name for name in names if name) or "config"

    def open(self, event: Any) -> None:
        """Enter a mapping or list."""
        key, top = self.here(), self.levels[-1] if self.levels else None
        if top and top.is_mapping and top.next_key is None:
            fail(key, "a mapping or list as a key", "text as a key")
        if event.tag is not None and not event.tag.endswith((":map", ":seq")):
            fail(key, f"the tag {event.tag} given", "a value without a tag")
        name = "" if top is None else key.rpartition(".")[2]
        is_mapping = isinstance(event, yaml.MappingStartEvent)
        self.levels.append(_Level(name, is_mapping, event.anchor))
        self._reach(key, len(self.levels))

    def close(self) -> None:
        """Leave the innermost mapping or list."""
        level = self.levels.pop()
        if level.anchor is not None:
            self.heights[level.anchor] = level.height
        if self.levels:
            top = self.levels[-1]
            top.height = max(top.height, level.height + 1)
            self._next(None)

    def alias(self, event: Any) -> None:
        """Read an alias (`*name`): a reference to an earlier node."""
        if any(level.anchor == event.anchor for level in self.levels):
            fail(
                self.here(),
                f"*{event.anchor} given inside of &{event.anchor}",
                "a value of its own",
            )
        height = self.heights.get(event.anchor, 0)
        self._reach(self.here(), len(self.levels) + height)
        if event.anchor not in self.heights:
            fail(self.here(), f"*{event.anchor} given, and no &{event.anchor} before it", "a value")
        if self.levels:
            top = self.levels[-1]
            top.height = max(top.height, height + 1)
            self._next(f"*{event.anchor}")

    def scalar(self, event: Any) -> None:
        """Read a key, or a value that is no mapping or list."""
        top, key = self.levels[-1] if self.levels else None, self.here()
        is_key = bool(top and top.is_mapping and top.next_key is None)
        tag = event.tag if event.tag not in (None, "!") else self._tag(event)
        if is_key and tag.endswith(":merge"):  # a YAML merge key, `<<: *anchor`
            self._next(event.value)
            return
        try:
            value = self.loader.construct_object(yaml.ScalarNode(tag, event.value))
        except (ValueError, OverflowError, LookupError, AttributeError, yaml.YAMLError) as error:
            problem = f"{shown(event.value)} given, not a valid {tag.rpartition(':')[2]}"
            if isinstance(error, yaml.MarkedYAMLError):
                problem = f"{shown(event.value)} given: {error.problem}"
            elif tag.endswith(":int") and len(event.value) > 300:
                problem = f"a whole number of {len(event.value)} digits given"
            fail(event.value if is_key else key, problem, "a plain value")
        if is_key and len(self.levels) == 1 and not self.root and not isinstance(value, str):
            fail(event.value, f"{shown(value)} given as a key", "text as a key")
        if not is_key:
            _check_leaf(key, value)
        if event.anchor is not None:
            self.heights[event.anchor] = 0
        self._next(event.value)

    def _tag(self, event: Any) -> str:
        tag = self.loader.resolve(yaml.ScalarNode, event.value, event.implicit)
        return "tag:yaml.org,2002:str" if tag.endswith(":timestamp") else tag  # as in OmegaConf

    def _next(self, value: str | None) -> None:
        """Count a complete node; in a mapping, keys and values alternate."""
        if self.levels:
            top = self.levels[-1]
            top.items += 1
            top.next_key = value if top.is_mapping and top.next_key is None else None

    def _reach(self, key: str, depth: int) -> None:
        if depth + (self.root.count(".") + 1 if self.root else 0) > MAX_DEPTH:
            fail(key, f"nested more than {MAX_DEPTH} levels deep", _NESTING)


def check_yaml(text: str, key: str = "") -> None:
    """Check a YAML document event by event, without recursion."""
    reader = _Reader(key, yaml.SafeLoader(""))
    allowed = "YAML, with a text of several signs in quotes" if key else "YAML"
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.CollectionStartEvent):
                reader.open(event)
                if not key and isinstance(event, yaml.SequenceStartEvent) and not reader.levels[1:]:
                    fail("config", "a list given", "keys with values")
            elif isinstance(event, yaml.CollectionEndEvent):
                reader.close()
            elif isinstance(event, yaml.AliasEvent):
                reader.alias(event)
            elif isinstance(event, yaml.ScalarEvent):
                if not key and not reader.levels and event.value:
                    fail("config", f"{shown(event.value)} given", "keys with values")
                reader.scalar(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        fail(reader.here(), f"not YAML{place}: {error.problem}", allowed)
    except yaml.YAMLError as error:  # a character that YAML forbids
        line = text[: getattr(error, "position", 0)].count("\n") + 1
        fail(reader.here(), f"not YAML in line {line}: {str(error).splitlines()[0]}", allowed)


def check_values(given: Any) -> None:
    """Check nested plain values before their interpolations are replaced."""
    pending: list[tuple[str, Any, int]] = [("", given, 0)]
    texts: list[tuple[str, str]] = []
    while pending:
        key, value, depth = pending.pop()
        if not isinstance(value, dict | list):
            _check_leaf(key, value)
            if isinstance(value, str) and "${" in value:
                texts.append((key, value))
            continue
        if depth >= MAX_DEPTH:
            fail(key, f"nested more than {MAX_DEPTH} levels deep", _NESTING)
        items = value.items() if isinstance(value, dict) else enumerate(value)
        pending += [(f"{key}.{name}" if key else str(name), v, depth + 1) for name, v in items]
    sizes = _Sizes(given)
    for key, text in texts:
        sizes.text(key, key, text, ())


def _check_leaf(key: str, value: Any) -> None:
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        digits = int((value.bit_length() - 1) * 0.30103) + 1
        fail(key, f"a whole number of {digits} digits given", "numbers of at most 300 digits")
    # No resolvers of OmegaConf: a config is data, and some resolvers run code.
    if isinstance(value, str) and "${" in _INTERPOLATION.sub("", value):
        fail(key, f"{shown(value)} given", "${key} alone, and no resolver")


class _Sizes:
    """Computes how long texts with interpolations become, without replacing the interpolations.

    A dozen nested interpolations can make gigabytes.
    """

    def __init__(self, given: Any) -> None:
        self._given = given
        self._known: dict[str, tuple[int, int]] = {}
        """By key: size of the value after replacement, and longest chain of keys behind it."""

    def text(self, asked: str, key: str, text: str, above: tuple[str, ...]) -> tuple[int, int]:
        """Return a text's size after replacement, and the longest chain of keys it refers to."""
        total, longest = len(text), 0
        for target in _INTERPOLATION.findall(text):
            path = _absolute(key, target)
            if path in above:
                fail(asked, f"{shown(text)} given, which refers back to {path}", "another value")
            if path not in self._known and len(above) < MAX_DEPTH:
                found = _at(self._given, path)
                self._known[path] = self._value(asked, path, found, (*above, path))
            size, chain = self._known.get(path, (0, MAX_DEPTH))
            total, longest = total + size, max(longest, chain + 1)
            if longest > MAX_DEPTH:
                problem = f"{shown(text)} refers to a chain of more than {MAX_DEPTH} keys"
                fail(asked, problem, "a value of its own")
            if total > MAX_EXPANDED:
                problem = f"{shown(text)} becomes longer than {MAX_EXPANDED} characters"
                fail(asked, problem, "a shorter value")
        return total, longest

    def _value(self, asked: str, key: str, value: Any, above: tuple[str, ...]) -> tuple[int, int]:
        if isinstance(value, str):
            return self.text(asked, key, value, above)
        if not isinstance(value, Mapping | list):
            return 1, 0
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        parts = [self._value(asked, f"{key}.{name}", v, above) for name, v in items]
        return 1 + sum(size for size, _ in parts), max((chain for _, chain in parts), default=0)


def _absolute(key: str, target: str) -> str:
    """Return the key that an interpolation at `key` names; leading dots count levels upwards."""
    path = target.replace("[", ".").replace("]", "")
    relative = len(target) - len(target.lstrip("."))
    if not relative:
        return path.strip(".")
    base = key.split(".")[:-relative]
    return ".".join([*base, path.strip(".")])


def _at(given: Any, path: str) -> Any:
    for name in path.split("."):
        if isinstance(given, list) and name.isdigit() and int(name) < len(given):
            given = given[int(name)]
        elif isinstance(given, Mapping):
            given = given.get(name)
        else:
            return None
    return given
