"""What a serving entry leaves to others: the family of its target, and the checkpoints. An entry of its own wins."""

from collections.abc import Iterator, Mapping
from typing import Any

from rig.catalog.yaml_source import Document, Key, Place
from rigctl.contract.speculation import Method

DRAFTERS_DRAFT: Method = "eagle3"
"""The method of a drafter whose entry names none."""

Defaults = Mapping[str, Place]
"""Dotted key of an entry -> where its value stands."""

NOBODY = Place("?", 0)
"""Where nothing is written: kimi-rig's own choice, which is listed nowhere."""

BY_ENGINE = {
    "tool_call_parser": ("parsers", "tool"),
    "reasoning_parser": ("parsers", "reasoning"),
    "memory_fraction": ("memory_fraction",),
    "memory_reserve": ("memory_reserve",),
}
"""Key of a serving entry -> the key of a family that has it by engine, and the key below the engine."""
OF_THE_MODEL = ("answer", "quiet", "sampling")


def with_defaults(documents: Mapping[str, Document]) -> tuple[Document, dict[str, Defaults]]:
    """The serving entries, each with what it leaves out, and for each what that was and where it stands."""
    serving, found = documents["serving"], dict[str, Defaults]()
    result = Document(dict(serving.data), dict(serving.places))
    for name, value in serving.data.items():
        if not isinstance(value, Mapping):
            continue
        entry, under = serving.section(name), Document()
        for path, default, place in _defaults(entry, documents):
            under = under.merged(_nested(path, default, place))
        whole = entry.filled(under)
        result.data[name] = whole.data
        result.places |= {(name, *path): place for path, place in whole.places.items()}
        new = {path: place for path, place in whole.places.items() if path not in entry.places and path in under.places}
        found[name] = {
            ".".join(map(str, path)): place
            for path, place in new.items()
            if _plain(whole, path) and place is not NOBODY
        }
    return result, found


def _defaults(entry: Document, documents: Mapping[str, Document]) -> Iterator[tuple[tuple[str, ...], Any, Place]]:
    """Key path, value and place of whatever the entries that it names have for it."""
    target, release, speculation = (entry.data.get(key) for key in ("target", "release", "speculation"))
    model = documents["checkpoints"].section(str(target))
    runs = documents["releases"].section(str(release)).data
    family = documents["families"].section(str(model.data.get("family")))
    for key, path in BY_ENGINE.items():
        below = (path[0], str(runs.get("engine")), *path[1:])
        cpu = runs.get("accelerator") == "cpu" and key.startswith("memory_")
        if (value := _at(family, below)) is not None and not cpu:
            yield (key,), value, family.place(below)
    for key in OF_THE_MODEL:
        if (value := family.data.get(key)) is not None:
            yield (key,), value, family.place((key,))
    if model.data and "family" not in model.data:
        # As before there were families.
        yield ("memory_fraction",), "host", NOBODY
    if not isinstance(speculation, Mapping):
        return
    drafter = documents["checkpoints"].section(str(speculation.get("drafter")))
    head = model.section("heads", "mtp")
    if "method" in drafter.data:
        yield ("speculation", "method"), drafter.data["method"], drafter.place(("method",))
    if speculation.get("method") == "mtp" and "steps" in head.data:
        yield ("speculation", "steps"), head.data["steps"], head.place(("steps",))


def _at(document: Document, path: tuple[str, ...]) -> Any:
    return document.section(*path[:-1]).data.get(path[-1])


def _nested(path: tuple[str, ...], value: Any, place: Place) -> Document:
    """A document with one value, and its parts, at a path."""
    places: dict[Key, Place] = {path[: length + 1]: place for length in range(len(path))}
    parts: list[tuple[Key, Any]] = [(path, value)]
    while parts:
        here, part = parts.pop()
        places[here] = place
        if isinstance(part, Mapping):
            parts += [((*here, key), inner) for key, inner in part.items()]
    for key in reversed(path):
        value = {key: value}
    return Document(value, places)


def _plain(document: Document, path: tuple[str | int, ...]) -> bool:
    """Whether there is a value at a path, and no mapping of further keys."""
    value: Any = document.data
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value is not None and not isinstance(value, Mapping)
