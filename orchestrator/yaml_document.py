"""Parses YAML that a user wrote into JSON's types, within limits of size, depth and aliases."""

from __future__ import annotations

import re
from typing import Any, ClassVar, cast

import yaml
from yaml.constructor import ConstructorError
from yaml.error import MarkedYAMLError

from rayzero.engine.config.parse import MAX_DOCUMENT_BYTES, to_plain
from rayzero.engine.errors import ConfigError, first_line

_FLOAT_WITH_EXPONENT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")
MAX_DEPTH = 100
_MAX_DIGITS = 1000
_TAG = "tag:yaml.org,2002:"


class _YamlLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A loader that knows only JSON's types; dates are text.

    Also reads 1e-4 as a float: PyYAML implements YAML 1.1, where it is a string.
    """

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _TAG + "timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        if first != "="
    }

    def construct_number(self, node: yaml.ScalarNode) -> float:
        """Returns the number of a node. Raises ConstructorError."""
        is_integer = node.tag == _TAG + "int"
        try:
            if len(node.value) <= _MAX_DIGITS:
                convert = self.construct_yaml_int if is_integer else self.construct_yaml_float
                return cast(float, convert(node))
        except (ValueError, OverflowError):
            pass
        problem = f"{node.value:.40} is not a number of at most {_MAX_DIGITS} digits"
        raise ConstructorError(None, None, problem, node.start_mark)


_YamlLoader.add_implicit_resolver(_TAG + "float", _FLOAT_WITH_EXPONENT, list("-+.0123456789"))
_YamlLoader.add_constructor(_TAG + "int", _YamlLoader.construct_number)
_YamlLoader.add_constructor(_TAG + "float", _YamlLoader.construct_number)


def parse_yaml(text: str, source: str) -> Any:
    """Returns plain values. Raises ConfigError if the text is not YAML, or exceeds a limit."""
    to_plain(text, source)
    try:
        _check_yaml_nodes(text)
        value = _load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or first_line(error)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        lines = text.splitlines()
        if mark and mark.line < len(lines) and "\t" in lines[mark.line][: mark.column + 1]:
            problem = "a tab; YAML is indented with spaces"
        raise ConfigError(f"{source} is not YAML: {where}{problem}") from None
    return to_plain(value, source, MAX_DEPTH)


def _load(text: str) -> Any:
    """Returns the document's values. Raises YAMLError, also for a key that is given twice: PyYAML
    would keep only the second value."""
    loader = _YamlLoader(text)
    try:
        node = loader.get_single_node()
        _check_keys(node, set())
        return None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


def _check_keys(node: yaml.Node | None, done: set[int]) -> None:
    if not isinstance(node, yaml.CollectionNode) or id(node) in done:
        return
    done.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_keys(item, done)
        return
    names = set()
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode) and key.value in names:
            problem = f"the key {key.value!r:.200} is given twice"
            raise MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        names.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        _check_keys(value, done)


def _check_yaml_nodes(text: str) -> None:
    """Raises MarkedYAMLError, with the place, for a document that the loader would run long on or
    that JSON cannot represent: one that is large with its aliases expanded, deep nesting, tags."""
    sizes: dict[str | None, int] = {}  # {anchor: characters of its node}
    unclosed: list[tuple[str | None, int]] = []  # (anchor, characters of the document before it)
    size = 0
    for event in yaml.parse(text, _YamlLoader):
        problem = ""
        match event:
            case yaml.AliasEvent():
                if event.anchor not in sizes:
                    problem = f"the alias *{event.anchor:.40} has no anchor before it, or is in it"
                size += sizes.get(event.anchor, 0)
            case yaml.CollectionEndEvent():
                anchor, before = unclosed.pop()
                sizes[anchor] = size - before
            case yaml.ScalarEvent():
                sizes[event.anchor] = 1 + len(event.value)
                size += sizes[event.anchor]
            case yaml.CollectionStartEvent():
                unclosed.append((event.anchor, size))
                sizes.pop(event.anchor, None)  # aliases within would be recursive
                size += 1
        if tag := getattr(event, "tag", None):
            problem = f"the tag {tag:.40} is not allowed; text is written in quotes"
        if len(unclosed) > MAX_DEPTH:
            problem = f"nested too deeply: at most {MAX_DEPTH} levels are allowed"
        if size > MAX_DOCUMENT_BYTES:
            problem = f"with its aliases it has more than {MAX_DOCUMENT_BYTES} characters"
        if problem:
            mark: Any = event.start_mark
            raise MarkedYAMLError(problem=problem, problem_mark=mark)
