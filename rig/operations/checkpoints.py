"""Model and drafters on the host: complete and proved, or not there."""

import json
import shlex
from typing import Any

from pyinfra import host
from pyinfra.api import operation

from rig.artifacts.checkpoint_orders import (
    adopted_as_it_is,
    manifest,
    revision,
    specification_path,
    wanted_identity,
)
from rig.catalog.entries import Checkpoint
from rig.facts.state import Lines
from rig.operations import jobs
from rig.operations.common import Commands, made, note, notice, refuse, remember, script
from rigctl.contract import layout
from rigctl.contract.served_checkpoints import DrafterPairs
from rigctl.contract.sources import GeneratorSource, HttpSource, HubSource, described

# 595 GB at 100 Mbit/s take 13 hours; a job that outlasts this has hung.
LIMIT_SECONDS = 48 * 3600


@operation()
def checkpoint(checkpoint_name: str, entry: Checkpoint, path: str, hub_token: bool) -> Commands:
    """The checkpoint lies complete at `path` and is recorded. What the operator put there is never changed.

    Its state is rigctl's quick verification: size, modification time and inode of every file against the record of the
    last full proof.
    """
    name, there = checkpoint_name, f"[ -e {shlex.quote(path)}/config.json ]"
    status = f"{layout.RIGCTL} checkpoints status {name} --json"
    look = f"{status}; {there} && echo there; [ -e {shlex.quote(path)} ] && echo exists"
    found = host.get_fact(Lines, script=f'{look}; echo "at $(readlink -f {shlex.quote(path)})"')
    state = _state(found)
    # Recorded is the directory that a link leads to.
    here = f"at {state.get('path')}" in found
    complete = state.get("state") == "complete" and here and _is_wanted(name, entry, state)
    compared = complete and _vouched_by_a_mirror(entry, state)
    if complete and not compared:
        host.noop(f"{path} is complete")
        return
    fault = _fault(name, entry, path, state) if here and "exists" in found and state["state"] != "running" else None
    if fault is not None and not compared:
        yield from refuse(fault)
        return
    if "there" not in found and (adopted_as_it_is(entry) or _unproved(name, entry)):
        yield from refuse(_unproved(name, entry) or _absent(name, entry, path))
        return
    then = "its digests are compared with its endpoint's: up to version 0.2.0 a mirror told them too"
    note(f"{path}: {then if compared else _what_happens(entry, state, 'there' in found, here)}")
    if isinstance(entry.source, HubSource) and not adopted_as_it_is(entry) and manifest(name, entry) is None:
        pin = f"`make pin CHECKPOINT={name}` writes it"
        notice(f"checkpoint {name} has no manifest in inventory/manifests, the hub is asked for its list: {pin}")
    # What staging brings is ours to take away; what is adopted is not.
    parent, _, folder = path.rpartition("/")
    brought = [
        f"[ -e {shlex.quote(one)} ] || {{ {remember(kind, one)}; }}"
        for kind, one in (("tree", path), ("work", f"{parent}/.{folder}.partial"))
    ]
    yield script(*brought, made(parent))
    unit = f"kimi-job-checkpoint-{name}"
    verify = f"{layout.RIGCTL} checkpoints verify {name}"
    token = [f"LoadCredential=hub-token:{layout.CREDENTIALS}/hub-token"] if hub_token else []
    yield from jobs.run(
        jobs.LongJob(
            unit=unit,
            argv=[layout.RIGCTL, "checkpoints", "stage", name, "--spec", specification_path(name)],
            # A job that refuses may leave an older content whole; of a unit that ended well systemd says success.
            proof=f"[ $(systemctl show -P Result {unit}) = success ] && {verify} >/dev/null",
            writes=None,
            network="any",
            limit_seconds=LIMIT_SECONDS,
            properties=["EnvironmentFile=-/etc/environment", *token],
        )
    )


@operation()
def drafters_fit(order: DrafterPairs) -> Commands:
    """Every configuration's drafter fits its target on its engine release, validated on the host by the files that lie
    there; layer ids that a release must read stand in an overlay beside the checkpoint, which stays as it is."""
    if not order.pairs:
        host.noop("no configuration has a drafter")
        return
    judge = f"{layout.RIGCTL} checkpoints pairs --json {shlex.quote(json.dumps(order.document()))}"
    found = [json.loads(line) for line in host.get_fact(Lines, script=judge) if line.startswith("{")]
    _warn(found)
    refused = [one for one in found if one["error"] is not None]
    if found and not refused and all(one["overlay"] in (None, "current") for one in found):
        host.noop("every drafter fits")
        return
    if refused and host.state.is_executing:
        yield from refuse("; ".join(str(one["error"]) for one in refused))
        return
    for one in found:
        verdict = one["verdict"] or {}
        ids = f"; layer ids {json.dumps(verdict.get('keys'))} are written beside it" if one["overlay"] else ""
        note(f"{one['name']}: {one['error'] or verdict['verdict'] + ids}")
    if not found:
        note("drafters are validated once they are there")
    yield script(f"{judge.replace(' pairs ', ' pairs --write ', 1)} >/dev/null")


def _warn(found: list[dict[str, Any]]) -> None:
    """Tell each warning once, with the configurations that it is of."""
    warnings: dict[str, list[str]] = {}
    for one in found:
        for text in (one["verdict"] or {}).get("warn", []):
            warnings.setdefault(text, []).append(one["name"])
    for text, names in warnings.items():
        notice(f"{', '.join(names)}: {text}")


def _is_wanted(name: str, entry: Checkpoint, state: dict[str, Any]) -> bool:
    """Whether what is recorded is what the entry asks for."""
    if state.get("origin") == "adopted" and state.get("revision") is None:
        # Taken as it lay, on a host that could not ask the hub.
        return True
    if revision(entry) not in (None, state.get("revision")):
        return False
    return wanted_identity(name, entry) in (None, state.get("identity"))


def _vouched_by_a_mirror(entry: Checkpoint, state: dict[str, Any]) -> bool:
    """Whether it was proved by a version that took digests from a mirror too, where the entry has one."""
    mirror = isinstance(entry.source, HubSource) and entry.source.mirror
    return bool(mirror and state.get("revision")) and state.get("digests_from") is None


def _unproved(name: str, entry: Checkpoint) -> str | None:
    """Why nothing would prove what is fetched, or None: digests come over https, or from a manifest."""
    match entry.source:
        case HubSource(endpoint=str(address)) | HttpSource(manifest_url=str(address)) | HttpSource(url=address):
            if address.startswith("http://") and manifest(name, entry) is None:
                return (
                    f"checkpoint {name}: {address} is not https, so the digests that it lists prove nothing: give an "
                    "https address (a CA of your own by SSL_CERT_FILE in the host's /etc/environment), or put a "
                    "manifest into inventory/manifests; then deploy again"
                )
    return None


def _fault(name: str, entry: Checkpoint, path: str, state: dict[str, Any]) -> str | None:
    """Why the staging will not go on with what is recorded at the path, or None. It never repairs or replaces what it
    did not order itself."""
    if _is_wanted(name, entry, state):
        return str(state.get("fault") or f"{path} is not as it was proved: `rigctl checkpoints verify --full {name}`")
    if isinstance(entry.source, GeneratorSource) and state["origin"] == "staged":
        return None
    return (
        f"{path} holds {state['revision'] or 'another content'}, checkpoint {name} wants "
        f"{revision(entry) or 'another content'}: give it another path, or move {path} away; then deploy again"
    )


def _state(lines: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = next((json.loads(line) for line in lines if line.startswith("{")), {})
    return found


def _what_happens(entry: Checkpoint, state: dict[str, Any], there: bool, here: bool) -> str:
    if state.get("state") == "running":
        return "the staging that is at work is followed"
    if there and not here:
        return "is proved and recorded as it lies there"
    if isinstance(entry.source, GeneratorSource):
        return f"is generated ({entry.source.generator})"
    return f"is staged from {described(entry.source)}"


def _absent(name: str, entry: Checkpoint, path: str) -> str:
    if isinstance(entry.source, HubSource):
        return (
            f"checkpoint {name} is not at {path} and {entry.source.repository} has no pinned revision: "
            f"`make pin CHECKPOINT={name}`, or put the files there, or say allow_unpinned: true; then deploy again"
        )
    return f"checkpoint {name} is not at {path}: put it there and deploy again"
