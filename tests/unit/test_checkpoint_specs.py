"""Catalogue entries of every source kind, as rigctl takes them; drafters as `make explain` shows them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rig.artifacts import checkpoint_orders
from rig.artifacts.units import pairs, run_specification
from rig.catalog.entries import Checkpoint, load_catalog
from rig.catalog.yaml_source import CatalogError
from rig.cli.tour import INVENTORY, inventory_hosts, recorded_plan
from rig.plan.drafter_layers import drafters_json, drafters_text
from rig.plan.host_plan import HostPlan
from rigctl.contract.checkpoint_job import CheckpointJob
from rigctl.contract.order import ContractError
from rigctl.contract.sources import Files

COMMIT = "0123456789" * 4
HUB = {"kind": "hub", "repository": "lab/tiny", "revision": COMMIT}
RSYNC = {"kind": "rsync", "host": "store.example.com", "path": "/models/kimi", "identity_file": "/root/.ssh/models"}


@pytest.fixture(scope="module")
def host() -> HostPlan:
    [found] = inventory_hosts(INVENTORY)
    return recorded_plan({**found["data"], "hub_token_file": "/secret"})


def with_source(host: HostPlan, source: dict[str, Any], **more: Any) -> HostPlan:
    entry = Checkpoint.model_validate({"role": "target", "path": "/shared/x", "source": source, **more})
    return replace(host, checkpoints={"x": entry}, checkpoint_paths={"x": "/shared/x"})


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ({**HUB, "endpoint": "https://hub.example.com", "mirror": "https://mirror.example.com/"}, "hub"),
        ({"kind": "hub", "repository": "lab/tiny", "allow_unpinned": True}, "hub"),
        ({"kind": "http", "url": "http://files.example.com/kimi/", "include": ["*.safetensors"]}, "http"),
        (RSYNC, "rsync"),
        ({"kind": "local", "path": "/mnt/disk/kimi", "exclude": ["*.pt"]}, "local"),
        ({"kind": "generator", "generator": "target"}, "generator"),
    ],
)
def test_every_kind_is_what_rigctl_takes(host: HostPlan, source: dict[str, Any], kind: str) -> None:
    order = checkpoint_orders.order(with_source(host, source), "x")
    parsed = CheckpointJob.parse_text(order.text(), "x")
    assert parsed.source.kind == kind and parsed.destination == "/shared/x"
    assert parsed.document() == order.document()
    if isinstance(parsed.source, Files):
        assert parsed.source.exclude == source.get("exclude", [])
        assert parsed.source.include == source.get("include", ["*"])
    assert (parsed.token is not None) == (kind == "hub")


def test_the_keys_of_a_source_arrive(host: HostPlan) -> None:
    rsync = checkpoint_orders.order(with_source(host, RSYNC, bandwidth_limit=1000), "x").document()
    assert rsync["bandwidth_limit"] == 1000
    assert rsync["source"]["identity_file"] == "/root/.ssh/models" and rsync["source"]["user"] == "root"
    hub = checkpoint_orders.order(with_source(host, {**HUB, "mirror": "https://mirror.example.com/"}), "x").document()
    assert hub["source"]["mirror"] == "https://mirror.example.com" and hub["source"]["revision"] == COMMIT


@pytest.mark.parametrize("source", [{"kind": "directory"}, {"kind": "hub", "repository": "lab/tiny"}])
def test_what_has_nothing_to_compare_with_is_only_adopted(host: HostPlan, source: dict[str, Any]) -> None:
    plan = with_source(host, source)
    assert checkpoint_orders.adopted_as_it_is(plan.checkpoints["x"])
    assert checkpoint_orders.order(plan, "x").source.kind == "directory"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ({**HUB, "endpoint": "hub.example.com"}, "begins with http"),
        ({**HUB, "mirror": "https://user:secret@mirror.example.com"}, "no user, password"),
        ({**HUB, "revision": "main"}, "pin the commit"),
        ({"kind": "http", "url": "https://files.example.com/kimi?key=1"}, "no user, password, query"),
        ({"kind": "http"}, "is missing"),
        ({**RSYNC, "path": "models/kimi"}, "a path is absolute"),
        ({**RSYNC, "host": "-oProxyCommand=x"}, "neither an IP address nor a host name"),
        ({**RSYNC, "user": "-l"}, "a user's name is letters"),
        ({**RSYNC, "include": []}, "at least 1 item"),
        ({"kind": "local", "path": "/"}, "is not / itself"),
        ({"kind": "local", "path": "/x", "colour": "y"}, "there is no such key"),
    ],
)
def test_a_wrong_source_is_named_with_its_key(tmp_path: Path, source: dict[str, Any], says: str) -> None:
    (tmp_path / "serving.yaml").write_text("{}\n")
    (tmp_path / "releases.yaml").write_text("{}\n")
    entry = {"x": {"role": "target", "path": "/shared/x", "source": source}}
    (tmp_path / "checkpoints.yaml").write_text(json.dumps(entry))
    with pytest.raises(CatalogError) as caught:
        load_catalog(None, tmp_path)
    assert says in str(caught.value) and "checkpoints.x.source" in str(caught.value)


def test_a_manifest_counts_for_the_revision_it_is_of(
    host: HostPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIMI_RIG_INVENTORY", str(tmp_path))
    (tmp_path / "manifests").mkdir()
    plan = with_source(host, HUB)
    assert checkpoint_orders.order(plan, "x").manifest is None
    files = [{"path": "config.json", "size": 2, "sha256": "1" * 64}]
    content = {"format": 1, "source": "hub:lab/tiny", "revision": COMMIT, "files": files}
    (tmp_path / "manifests" / "x.json").write_text(json.dumps(content))
    assert checkpoint_orders.order(plan, "x").manifest == "/etc/kimi-rig/manifests/x.json"
    assert checkpoint_orders.wanted_identity("x", plan.checkpoints["x"]) is None  # its revision says it
    web = with_source(host, {"kind": "http", "url": "http://files.example.com"})
    assert checkpoint_orders.wanted_identity("x", web.checkpoints["x"])
    assert set(checkpoint_orders.checkpoint_files(plan)) == {
        "/etc/kimi-rig/manifests/x.json",
        "/etc/kimi-rig/checkpoints/x.json",
    }
    for other in ({"kind": "directory"}, {**HUB, "revision": "f" * 40}, {"kind": "generator", "generator": "target"}):
        elsewhere = with_source(host, other)
        assert checkpoint_orders.order(elsewhere, "x").manifest is None
        assert checkpoint_orders.wanted_identity("x", elsewhere.checkpoints["x"]) is None


def trained(host: HostPlan, **training: Any) -> HostPlan:
    """The recorded host, its custom drafter trained as given."""
    entry = host.checkpoints["custom-drafter"]
    content = {**entry.model_dump(), "training": {"target": "kimi-k2.5-int4", **training}}
    return replace(host, checkpoints={**host.checkpoints, "custom-drafter": Checkpoint.model_validate(content)})


def test_known_layer_ids_are_written_beside_the_drafter_as_each_release_reads_them(host: HostPlan) -> None:
    plan = trained(host, convention="output", layer_ids=[2, 30, 58])
    shown = {one["configuration"]: one for one in drafters_json(plan)}
    assert shown["vllm-eagle3-custom"]["written"] == {"eagle_aux_hidden_state_layer_ids": [3, 31, 59]}
    assert shown["sglang-eagle3-custom"]["written"]["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 30, 58]
    overlay = "/var/lib/kimi-rig/drafters/custom-drafter/vllm-0.16.0"
    specification = run_specification(plan, "vllm-eagle3-custom")
    assert specification.drafter_path == overlay
    [pair] = [one for one in pairs(plan).pairs if one.name == "vllm-eagle3-custom"]
    assert (pair.drafter_path, pair.checkpoint_path) == (overlay, host.checkpoint_paths["custom-drafter"])
    assert f"{overlay}/config.json" in drafters_text(plan)


def test_an_accepted_mismatch_or_an_unknown_convention_leaves_the_drafter_alone(host: HostPlan) -> None:
    for plan in (host, trained(host, convention="output", layer_ids=[2, 30, 58], accept_mismatch=True)):
        at = run_specification(plan, "vllm-eagle3-custom").drafter_path
        assert at == host.checkpoint_paths["custom-drafter"]


def test_unknown_conventions_and_other_targets_are_told(host: HostPlan) -> None:
    text = drafters_text(host)
    assert "layer id convention UNKNOWN" in text
    assert "trained for kimi-k2, used with kimi-k2.5-int4" in text and "about 15 % of 5 drafted tokens" in text


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"training": {"layer_ids": [1]}}, "layer_ids need a convention"),
        ({"training": {"convention": "outputs"}}, "'input', 'output', 'engine-default' or 'unknown'"),
        ({"training": {"convention": "output", "layer_ids": []}}, "at least 1 item"),
        ({"training": {"convention": "output", "layer_ids": [-1]}}, "greater than or equal to 0"),
        ({"provenance": {"samples": 0}}, "greater than or equal to 1"),
        ({"provenance": {"sample": 1}}, "Extra inputs are not permitted"),
        ({"role": "target", "training": {"target": "x"}}, "training, provenance and method belong to drafters"),
        ({"digests": {"config.json": "abc"}}, "should match pattern"),
    ],
)
def test_a_wrong_training_is_named(more: dict[str, Any], says: str) -> None:
    content = {"role": "drafter", "path": "/data/x", "source": {"kind": "directory"}, **more}
    with pytest.raises(ValueError, match="1 validation error") as caught:
        Checkpoint.model_validate(content)
    assert says in str(caught.value)


def test_words_of_a_pattern_and_of_a_long_name() -> None:
    source = {"kind": "hub", "repository": "model"}
    with pytest.raises(ContractError, match=r"source.repository: a repository is OWNER/NAME.* \(got 'model'\)"):
        CheckpointJob.parse({"format": 1, "name": "x", "destination": "/x", "source": source}, "here")
    with pytest.raises(ContractError, match="name: at most 80 lower-case letters"):
        CheckpointJob.parse({"format": 1, "name": "x" * 300, "destination": "/x", "source": {"kind": "directory"}}, "x")
