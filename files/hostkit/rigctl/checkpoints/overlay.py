"""A drafter's directory with another config.json, its weights linked: the checkpoint is never changed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rigctl.checkpoints.paths import remove_tree
from rigctl.errors import RigctlError
from rigctl.whole_files import read_json, sync_directory, write_json

MARK = ".rigctl-overlay.json"


def write(drafter: Path, place: Path, keys: Mapping[str, Any]) -> bool:
    """Make `place` an overlay of `drafter`, `keys` merged into config.json; False if it was already so."""
    if place.is_symlink() or (place.exists() and not (place / MARK).is_file()):
        raise RigctlError(f"{place} exists and is not an overlay of ours: choose another directory")
    if is_current(drafter, place, keys):
        return False
    config, mark = _wanted(drafter.resolve(), keys)
    place.parent.mkdir(parents=True, exist_ok=True)
    fresh = place.parent / f".{place.name}.new"
    remove_tree(fresh)
    fresh.mkdir()
    for name, target in mark["links"].items():
        (fresh / name).symlink_to(target)
    write_json(fresh / "config.json", config)
    write_json(fresh / MARK, mark)
    fresh.chmod(0o755)
    remove_tree(place)
    fresh.rename(place)
    sync_directory(place.parent)
    return True


def is_current(drafter: Path, place: Path, keys: Mapping[str, Any]) -> bool:
    """Whether `place` is what `write` would make, with nothing beside it that an engine could load."""
    config, mark = _wanted(drafter.resolve(), keys)
    try:
        return (
            json.loads((place / "config.json").read_text(encoding="utf-8")) == config
            and json.loads((place / MARK).read_text(encoding="utf-8")) == mark
            and _holds_only(place, mark["links"])
        )
    except (OSError, ValueError):
        return False


def merged(config: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with `keys` in it; of a key that is an object in both, the inner keys."""
    result = dict(config)
    for key, value in keys.items():
        old = result.get(key)
        result[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def _wanted(source: Path, keys: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(config.json, mark) of an overlay of `source`."""
    config = merged(read_json(source / "config.json", "config"), keys)
    links = {item.name: str(item) for item in sorted(source.iterdir()) if item.name != "config.json"}
    return config, {"drafter": str(source), "keys": dict(keys), "links": links}


def _holds_only(place: Path, links: Mapping[str, str]) -> bool:
    there = {item.name: item.is_symlink() and str(item.readlink()) for item in place.iterdir()}
    return there == {**links, "config.json": False, MARK: False}


def source(place: Path) -> Path | None:
    """The drafter behind an overlay; None where `place` is no overlay. Raises RigctlError for one that was changed."""
    mark = place / MARK
    if not mark.is_file():
        return None
    made = read_json(mark, "mark of the overlay")
    try:
        if not _holds_only(place, made["links"]):
            raise RigctlError(f"{place} does not hold what was made from {made['drafter']}: deploy again to renew it")
        return Path(made["drafter"])
    except (KeyError, TypeError, AttributeError) as error:
        raise RigctlError(f"{mark} is not a mark of ours ({error!r}): deploy again to renew it") from error
