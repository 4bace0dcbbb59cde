"""YAML with provenance: every value remembers the file and line it was written on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml.reader import ReaderError

from rigctl.errors import RigctlError

Key = tuple[str | int, ...]


DEEPEST, MOST = 40, 20_000
"""Levels of a value; an alias that contains itself has no end."""


class CatalogError(RigctlError):
    """A wrong catalogue: the message names file, line and entry, and what to write instead."""


@dataclass(frozen=True)
class Place:
    """Where a value was written."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass
class Document:
    """Plain data, and for every key path in it the place it came from."""

    data: dict[str, Any] = field(default_factory=dict)
    places: dict[Key, Place] = field(default_factory=dict)

    def place(self, key: Key) -> Place:
        """The place of `key`, or of the nearest enclosing key that has one."""
        while key not in self.places and key:
            key = key[:-1]
        return self.places.get(key, Place("?", 0))

    def section(self, *key: str) -> Document:
        """The mapping below `key` as a document of its own (empty when absent)."""
        value: Any = self.data
        for part in key:
            value = value.get(part) if isinstance(value, Mapping) else None
        depth = len(key)
        places = {path[depth:]: place for path, place in self.places.items() if path[:depth] == key}
        return Document(dict(value) if isinstance(value, Mapping) else {}, places)

    def merged(self, over: Document) -> Document:
        """This document with `over` laid on it: mappings merge, all else is replaced, null removes.

        A mapping that states another `kind` is another thing and replaces the old one whole.
        """
        result = Document(dict(self.data), dict(self.places))
        for name, value in over.data.items():
            mine = self.data.get(name)
            both = isinstance(mine, Mapping) and isinstance(value, Mapping)
            if both and value.get("kind", self.data[name].get("kind")) == self.data[name].get("kind"):
                child = self.section(name).merged(over.section(name))
            else:
                child = Document(value, over.section(name).places)
            result.places = {path: place for path, place in result.places.items() if path[:1] != (name,)}
            # Of what null removes the place stays: what is missing is missing there, and `filled` puts nothing there.
            result.places |= {(name, *path): place for path, place in child.places.items()}
            if value is None:
                result.data.pop(name, None)
            else:
                result.data[name] = child.data
        return result

    def filled(self, under: Document) -> Document:
        """This document with what only `under` has. A key that is written here, if only to remove it, stays."""
        result = Document(dict(self.data), dict(self.places))
        for name, value in under.data.items():
            mine, child = self.data.get(name), Document(value, under.section(name).places)
            if isinstance(mine, Mapping) and isinstance(value, Mapping):
                child = self.section(name).filled(child)
            elif name in self.data or (name,) in self.places:
                continue
            result.data[name] = child.data
            result.places |= {(name, *path): place for path, place in child.places.items()}
        return result


_COLLECTIONS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


def load(path: Path, shown_as: str | None = None) -> Document:
    """Read one YAML file.

    Raises CatalogError for an unreadable file, broken YAML, a duplicate key (which YAML parsers accept
    silently) or a top level that is no mapping.
    """
    shown = shown_as or str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CatalogError(f"{shown}: cannot be read: {error}") from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise CatalogError(f"{shown}:{line}: not valid YAML: {error.reason}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else 1
        raise CatalogError(f"{shown}:{line}: not valid YAML: {getattr(error, 'problem', error)}") from None
    except RecursionError:
        raise CatalogError(f"{shown}: its values are nested too deeply") from None
    if root is None:
        return Document()
    if not isinstance(root, yaml.MappingNode):
        raise CatalogError(f"{shown}:{root.start_mark.line + 1}: expected a mapping of names to entries")
    document = Document()
    document.data = _construct(root, shown, (), document.places)
    return document


def _construct(node: yaml.Node, file: str, key: Key, places: dict[Key, Place]) -> Any:
    places.setdefault(key, Place(file, node.start_mark.line + 1))
    if len(places) > MOST:
        raise CatalogError(f"{file}: more than {MOST:,} values, perhaps by an alias (*) of what has aliases itself")
    if len(key) > DEEPEST:
        raise CatalogError(f"{file}:{node.start_mark.line + 1}: {_dotted(key[:4])}: nested too deeply, or in itself")
    if isinstance(node, yaml.CollectionNode) and node.tag not in _COLLECTIONS:
        raise CatalogError(f"{file}:{node.start_mark.line + 1}: {_dotted(key)}: the tag {node.tag} means nothing here")
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for name, value_node, line in _items(node, file):
            if name in result:
                raise CatalogError(f"{file}:{line}: {_dotted((*key, name))} is defined twice")
            places[(*key, name)] = Place(file, line)
            result[name] = _construct(value_node, file, (*key, name), places)
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_construct(item, file, (*key, index), places) for index, item in enumerate(node.value)]
    loader = yaml.SafeLoader("")
    try:
        _unambiguous(node)
        value = loader.construct_object(node)
        if isinstance(value, str):
            _sendable(value)
        return value
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError) as error:
        # PyYAML's own constructors fail in each of these ways on a tag that does not fit its value.
        why = getattr(error, "problem", None) or (str(error) if isinstance(error, ValueError) else "not of its tag")
        raise CatalogError(f"{file}:{node.start_mark.line + 1}: {_dotted(key)}: {why}") from None


def _items(node: yaml.MappingNode, file: str) -> Iterator[tuple[str, yaml.Node, int]]:
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        plain = isinstance(key_node, yaml.ScalarNode) and key_node.value != "<<" and key_node.value.isprintable()
        if not plain:
            raise CatalogError(f"{file}:{line}: keys are plain names here (no merge keys, no structures)")
        yield key_node.value, value_node, line


def _unambiguous(node: yaml.Node) -> None:
    """Numbers that YAML 1.1 reads in another way than people do: 010000 is 4096, 22:00 is 1320."""
    numeric = node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float") and isinstance(node.value, str)
    if numeric and re.fullmatch(r"[-+]?(0[0-7_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)", node.value):
        read = yaml.SafeLoader("").construct_object(node)
        raise ValueError(f"YAML reads {node.value} as {read}: write {read}, or '{node.value}' if a text is meant")


def _sendable(text: str) -> None:
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("NUL and half characters cannot be part of a text")


def _dotted(key: Key) -> str:
    return ".".join(str(part) for part in key)
