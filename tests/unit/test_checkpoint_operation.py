"""The plan of a checkpoint says what the deploy will do, or refuses what the deploy will refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyinfra.api.connect import connect_all, disconnect_all
from pyinfra.api.exceptions import PyinfraError
from pyinfra.api.operation import add_op

from rig.catalog.entries import Checkpoint
from rig.operations.checkpoints import checkpoint
from rig.operations.common import PLAN_LOG, REFUSED
from rigctl.contract import layout
from tests.unit.test_operations import apply, local_state

COMPLETE = {"name": "x", "state": "complete", "origin": "staged", "revision": None, "identity": "i", "path": "{path}"}
DIRECTORY: dict[str, Any] = {"kind": "directory"}
GENERATOR: dict[str, Any] = {"kind": "generator", "generator": "target"}
HUB: dict[str, Any] = {"kind": "hub", "repository": "lab/tiny", "revision": "a" * 40}
MIRROR = {"mirror": "https://mirror.example.com"}
ELSEWHERE = {"path": "/elsewhere"}


@pytest.mark.parametrize(
    ("source", "status", "says"),
    [
        (HUB, COMPLETE | ELSEWHERE, "is proved and recorded as it lies there"),
        (GENERATOR, COMPLETE | ELSEWHERE, "is proved and recorded as it lies there"),
        (GENERATOR, COMPLETE | {"revision": "old"}, "is generated (target)"),
        (DIRECTORY, COMPLETE | ELSEWHERE | {"state": "damaged"}, "is proved and recorded as it lies there"),
        (HUB, COMPLETE | {"state": "running"}, "the staging that is at work is followed"),
        (HUB, COMPLETE | {"revision": "b" * 40}, f"{REFUSED}{{path}} holds {'b' * 40}, checkpoint x wants {'a' * 40}"),
        (GENERATOR, COMPLETE | {"revision": "old", "origin": "adopted"}, f"{REFUSED}{{path}} holds old"),
        (DIRECTORY, COMPLETE | {"state": "damaged", "fault": "z-old: move it out"}, f"{REFUSED}z-old: move it out"),
        (DIRECTORY, COMPLETE | {"state": "damaged"}, f"{REFUSED}{{path}} is not as it was proved"),
        (DIRECTORY, COMPLETE, None),
        (HUB, COMPLETE | {"revision": "a" * 40}, None),
        (HUB | MIRROR, COMPLETE | {"revision": "a" * 40}, "its digests are compared with its endpoint's"),
        (HUB | MIRROR, COMPLETE | {"revision": "a" * 40, "digests_from": "source"}, None),
        (HUB | MIRROR, COMPLETE | {"revision": "b" * 40}, f"{REFUSED}{{path}} holds {'b' * 40}"),
    ],
)
def test_the_plan_says_what_the_deploy_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: dict[str, Any], status: dict[str, Any], says: str | None
) -> None:
    place = tmp_path / "models" / "x"
    place.mkdir(parents=True)
    (place / "config.json").write_text("{}")
    told = json.dumps(status).replace("{path}", str(place))
    (tmp_path / "rigctl").write_text(f"#!/bin/sh\necho '{told}'\n")
    (tmp_path / "rigctl").chmod(0o755)
    monkeypatch.setattr(layout, "RIGCTL", str(tmp_path / "rigctl"))
    entry = Checkpoint.model_validate({"role": "target", "path": str(place), "source": source})
    arguments = {"checkpoint_name": "x", "entry": entry, "path": str(place), "hub_token": False}
    (tmp_path / "log").touch()
    monkeypatch.setenv(PLAN_LOG, str(tmp_path / "log"))
    state = local_state()
    connect_all(state)
    add_op(state, checkpoint, **arguments)
    disconnect_all(state)
    lines = map(json.loads, (tmp_path / "log").read_text().splitlines())
    details = [line["detail"] for line in lines if "detail" in line]
    if says is None:
        assert details == []
        return
    assert any(says.replace("{path}", str(place)) in detail for detail in details), details
    if says.startswith(REFUSED):
        with pytest.raises(PyinfraError):
            apply(checkpoint, **arguments)


@pytest.mark.parametrize(
    "source",
    [HUB | {"endpoint": "http://hub.example.com"}, {"kind": "http", "url": "http://web.example.com/x"}],
)
def test_a_list_that_proves_nothing_is_refused_in_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, source: dict[str, Any]
) -> None:
    monkeypatch.setattr(layout, "RIGCTL", "/bin/true")
    place = str(tmp_path / "x")
    entry = Checkpoint.model_validate({"role": "target", "path": place, "source": source})
    arguments = {"checkpoint_name": "x", "entry": entry, "path": place, "hub_token": False}
    with pytest.raises(PyinfraError):
        apply(checkpoint, **arguments)
    assert "is not https, so the digests that it lists prove nothing" in caplog.text
