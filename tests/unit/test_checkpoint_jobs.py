"""Orders for the checkpoints of a host: what the previous version wrote stays readable, and a changed document is
refused by field path or taken as it stands."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rig.artifacts import checkpoint_orders
from rig.catalog.entries import ROOT, Checkpoint, catalogues_of
from rig.cli.tour import INVENTORY, inventory_hosts, recorded_plan
from rig.plan.host_plan import HostPlan
from rigctl.checkpoints import staging
from rigctl.checkpoints.progress import Progress
from rigctl.checkpoints.record import State
from rigctl.checkpoints.workplace import Workplace
from rigctl.contract.checkpoint_job import CheckpointJob
from rigctl.contract.manifest import Manifest
from rigctl.contract.order import ContractError, Order
from rigctl.contract.served_checkpoints import DrafterPairs

# Written by the code of 0.3.0, commit 66d813d: orders of every kind of source, a staged checkpoint and one half way.
OLD: dict[str, Any] = json.loads((ROOT / "tests/fixtures/66d813d/checkpoints/orders.json").read_text())
ENTRIES = sorted(OLD["entries"])


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostPlan]:
    """A host with the entries of the fixture, and their manifests in the repository."""
    inventory = tmp_path_factory.mktemp("inventory")
    (inventory / "manifests").mkdir()
    for name, listed in OLD["manifests"].items():
        (inventory / "manifests" / f"{name}.json").write_text(json.dumps(listed))
    [found] = inventory_hosts(INVENTORY)
    entries = {name: Checkpoint.model_validate(OLD["entries"][name]["entry"]) for name in ENTRIES}
    plan = recorded_plan({**found["data"], "hub_token_file": "/secret"})
    paths = {name: entry.path for name, entry in entries.items()}
    with catalogues_of(inventory):
        yield replace(plan, checkpoints=entries, checkpoint_paths=paths)


@pytest.mark.parametrize("name", ENTRIES)
def test_an_order_of_the_previous_version_says_what_this_version_would_order(host: HostPlan, name: str) -> None:
    old = OLD["entries"][name]["order"]
    assert CheckpointJob.parse_text(old, name).text() == checkpoint_orders.order(host, name).text() == old


@pytest.mark.parametrize("name", ENTRIES)
def test_what_decides_whether_a_checkpoint_is_wanted_is_as_it_was(host: HostPlan, name: str) -> None:
    entry, old = host.checkpoints[name], OLD["entries"][name]
    assert checkpoint_orders.wanted_identity(name, entry) == old["wanted_identity"]
    assert checkpoint_orders.revision(entry) == old["revision"]


def staged(root: Path) -> tuple[State, Path, dict[str, Any]]:
    """A host on which the previous version staged x from src; the record says what stat says here."""
    files = {name: text.encode() for name, text in OLD["staged"]["files"].items()}
    files["model.safetensors"] = bytes.fromhex(OLD["staged"]["tensors"])
    record = json.loads(json.dumps(OLD["staged"]["record"]).replace("{root}", str(root)))
    for name, content in files.items():
        for place in (root / "src" / name, root / "host" / "models" / "x" / name):
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
        status = place.stat()
        record["seen"][name] = {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "inode": status.st_ino}
    state = State(root / "host" / "state")
    state.root.mkdir()
    state.record_path("x").write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    return state, root / "src", record


def job(root: Path, state: State, **more: Any) -> staging.Job:
    order = {"format": 1, "name": "x", "role": "drafter", "destination": f"{root}/host/models/x"}
    source = {"kind": "local", "path": f"{root}/src"}
    return staging.Job(
        CheckpointJob.parse({**order, "source": source, **more}, "test"), state, Progress("x"), threading.Event()
    )


def test_a_checkpoint_that_the_previous_version_staged_is_present(tmp_path: Path) -> None:
    state, source, record = staged(tmp_path)
    before = state.record_path("x").read_bytes()
    for file in source.rglob("*"):
        if file.is_file():
            file.unlink()  # nothing may be read again
    outcome = job(tmp_path, state).stage()
    assert (outcome.state, outcome.changed) == ("present", False)
    assert outcome.record.manifest.identity() == OLD["staged"]["identity"]
    assert outcome.record.manifest.document() == record["manifest"]
    assert state.record_path("x").read_bytes() == before
    state.save(outcome.record)
    assert state.record_path("x").read_bytes() == before


def test_a_manifest_is_written_as_the_previous_version_writes_it(tmp_path: Path) -> None:
    for listed in OLD["manifests"].values():
        assert Manifest.parse(listed, "test").document() == listed


def test_a_staging_that_the_previous_version_began_goes_on(tmp_path: Path) -> None:
    state, source, record = staged(tmp_path)
    whole, left = Manifest.parse(record["manifest"], "test"), OLD["half"]
    place = Workplace(tmp_path / "host" / "models" / "y")
    for folder in (place.tree, place.parts):
        folder.mkdir(parents=True)
    content = (source / "model.safetensors").read_bytes()[:10]
    [begun] = left["parts"]
    (place.parts / begun).write_bytes(content)
    (place.root / "owner.json").write_text(left["owner.json"])
    (place.tree / "config.json").write_bytes((source / "config.json").read_bytes())
    status = (place.tree / "config.json").stat()
    line = json.loads(left["verified.jsonl"])
    line["seen"] |= {"mtime_ns": status.st_mtime_ns, "inode": status.st_ino}
    (place.root / "verified.jsonl").write_text(json.dumps(line) + "\n")
    journal = (place.root / "verified.jsonl").read_bytes()
    place.begin(whole)
    assert (place.root / "owner.json").read_text() == left["owner.json"]
    assert place.part(whole.by_path["model.safetensors"]).read_bytes() == content
    assert place.proved(whole.by_path["config.json"]) is not None
    assert (place.root / "verified.jsonl").read_bytes() == journal, "it was hashed again"
    fetched = job(tmp_path, state, name="y", destination=str(place.destination))
    assert fetched.stage().state == "staged"
    assert fetched.progress.fetched == whole.total - len(content) - whole.by_path["config.json"].size


# -- changed documents ---------------------------------------------------------------------------------------

PAIRS = DrafterPairs.parse(
    {
        "format": 1,
        "pairs": [
            {
                "name": "vllm-eagle3",
                "engine": "vllm",
                "release": "vllm-0.16.0",
                "target_path": "/shared/kimi",
                "drafter_path": "/var/lib/kimi-rig/drafters/d/vllm-0.16.0",
                "checkpoint_path": "/data/d",
                "environment": {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"},
                "checkpoints": {
                    "target": "kimi",
                    "drafter": "d",
                    "version": "0.16.0",
                    "context": 32768,
                    "trust_remote_code": True,
                    "training": {"convention": "output", "layer_ids": [2, 30, 58], "notes": {"num_hidden_layers": 1}},
                },
            }
        ],
    },
    "test",
).document()
JOBS = [CheckpointJob.parse_text(OLD["entries"][name]["order"], name).document() for name in ENTRIES]
DOCUMENTS: list[tuple[type[Order], dict[str, Any]]] = [(DrafterPairs, PAIRS), *((CheckpointJob, one) for one in JOBS)]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=8), inner, max_size=2),
    max_leaves=4,
)
Path_ = tuple[str | int, ...]


def places(document: Any, path: Path_ = ()) -> Iterator[Path_]:
    """The path of every value in a document."""
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


def changed(document: dict[str, Any], draw: st.DrawFn) -> tuple[dict[str, Any], Path_]:
    """A copy with one value replaced, removed or added, and where."""
    result = copy.deepcopy(document)
    path = draw(st.sampled_from(sorted(places(document), key=str)))
    parent: Any = result
    for key in path[:-1]:
        parent = parent[key]
    if draw(st.booleans()):
        parent[path[-1]] = draw(VALUES)
    elif isinstance(parent, list) or draw(st.booleans()):
        del parent[path[-1]]
    else:
        path = (*path[:-1], draw(st.text(max_size=8)))
        parent[path[-1]] = draw(VALUES)
    return result, path


def taken(found: Any, given: Any) -> bool:
    """Whether everything that was given is in what was read, with its value (an address without its last slash)."""
    if isinstance(given, dict):
        return isinstance(found, dict) and all(key in found and taken(found[key], given[key]) for key in given)
    if isinstance(given, list):
        return isinstance(found, list) and len(found) == len(given) and all(map(taken, found, given))
    same = isinstance(given, bool) == isinstance(found, bool) and found == given
    return same or (isinstance(given, str) and found == given.rstrip("/"))


@given(st.data(), st.sampled_from(DOCUMENTS))
@settings(max_examples=150, deadline=None)
def test_a_changed_order_is_refused_by_field_path_or_taken_as_it_stands(
    data: st.DataObject, kind: tuple[type[Order], dict[str, Any]]
) -> None:
    model, document = kind
    given, path = data.draw(st.composite(lambda draw: changed(document, draw))())
    try:
        found = model.parse_text(json.dumps(given), "here")
    except ContractError as error:
        text = str(error)
        assert text.startswith("here: ")
        shown = [part if part.isprintable() else ascii(part) for part in map(str, path)]
        named = [".".join(shown[:end]) for end in range(1, len(path) + 1)]
        assert path == ("format",) or any(f"here: {name}" in text for name in named) or not path[0], text
    else:
        if given.get("format") == model.FORMAT:
            assert taken(found.document(), given), given


@given(VALUES | st.lists(VALUES))
@settings(deadline=None)
def test_what_is_no_order_at_all_is_refused(document: Any) -> None:
    for model in (CheckpointJob, DrafterPairs, Manifest):
        with pytest.raises(ContractError):
            model.parse_text(json.dumps(document), "here")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 2}, "here: format 2 is newer than this program reads (up to 1)"),
        ({"token": {"file": "/t", "credential": "c"}}, "here: token: a secret is either a credential or a file"),
        ({"token": {"file": "/t"}}, "token: a source of kind local takes none"),
        ({"generator_revision": "1"}, "generator_revision: a source of kind local has none"),
        ({"stall": float("inf")}, "here: stall: "),
        (
            {"source": {"kind": "local", "path": "/m", "includ": []}},
            "source.includ: there is no such key, did you mean",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(change: dict[str, Any], says: str) -> None:
    order = {"format": 1, "name": "x", "destination": "/shared/x", "source": {"kind": "local", "path": "/m"}}
    with pytest.raises(ContractError) as caught:
        CheckpointJob.parse({**order, **change}, "here")
    assert says in str(caught.value)
