"""The host is what the inventory says. Reads the live state; does not trust the deploy or its records."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath

import pytest

from rig.artifacts.checkpoint_orders import checkpoint_files
from rig.artifacts.edge import CERTIFICATE, ENGINE, KEYS, UNIT
from rig.artifacts.engine_inputs import engine_files
from rig.artifacts.kernel_orders import kernel_files, kernels
from rig.artifacts.receipt import receipt_items
from rig.artifacts.rollback_states import known_as, of_state, rollback_text, rolled_back
from rig.artifacts.units import conflicts, pairs
from rig.catalog.entries import ROOT
from rig.host.settings import ACS_UNIT
from rig.host.system_files import POWER_UNIT
from rig.operations.apt import LOGIN
from rig.operations.base_paths import base_paths
from rig.operations.edge import CHANGED
from rig.operations.files import Directory, File, Link
from rig.operations.hostkit import SOURCE, hostkit_files, hostkit_path
from rig.plan.secrets import PROMPT, key_digest
from rigctl.contract import layout
from rigctl.contract.sources import GeneratorSource
from rigctl.engines.drift import KERNEL_RECORD, LOCK, read_lock
from rigctl.engines.installed import normalised
from rigctl.tiny_models.checkpoints import checkpoint_files as generated
from tests.host.conftest import Target, json_of, run

RESTARTS = 7
"""So often an upgrade of libraries with needrestart was seen to restart ssh within seconds."""


def test_host_can_be_verified(name: str, trouble: str | None) -> None:
    if trouble is not None:
        pytest.fail(f"{name}: {trouble}", pytrace=False)


def test_no_rollback_is_in_force(target: Target) -> None:
    """All else is compared with the state that the rollback put in place."""
    assert not rolled_back(target.present), rollback_text(target.present)


def test_packages(target: Target) -> None:
    missing = [name for name in target.plan.packages if not target.host.package(name).is_installed]
    assert not missing, f"packages are missing: {', '.join(missing)}"


@pytest.mark.parametrize("which", ["serves", "builds"])
def test_users_cannot_log_in(target: Target, which: str) -> None:
    name = target.plan.data.service_user if which == "serves" else layout.BUILDER
    user = target.host.user(name)
    assert user.exists, f"user {name} is missing"
    assert user.shell == "/usr/sbin/nologin"
    assert user.uid < 1000, "it is a login user, not a system user"


def test_package_work_leaves_the_login(target: Target, warnings: list[str]) -> None:
    """A deploy resets ssh's counter and starts it again; an upgrade by others does not, and then nobody gets in."""
    wanted = "-p Id -p ActiveState -p StartLimitBurst -p StartLimitIntervalUSec"
    shown = run(target.host, f"systemctl show {wanted} {' '.join(LOGIN)}")
    for block in shown.strip().split("\n\n"):
        unit = dict(line.split("=", 1) for line in block.splitlines())
        burst, interval = int(unit["StartLimitBurst"]), unit["StartLimitIntervalUSec"]
        if unit["ActiveState"] == "active" and interval != "0" and burst <= RESTARTS:
            warnings.append(
                f"{target.name}: {unit['Id']} stays down after {burst} starts in {interval}, and upgrades reach that: "
                f"`systemctl edit {unit['Id']}` and set StartLimitIntervalSec=0 under [Unit]"
            )


def test_base_paths(target: Target) -> None:
    assert not differences(target, base_paths(target.plan))


def test_secrets_are_roots_alone(target: Target) -> None:
    for name in [*target.plan.secrets, *(["engine-key"] if target.plan.edge else [])]:
        secret = target.host.file(f"{layout.CREDENTIALS}/{name}")
        assert secret.exists, f"{secret.path} is missing"
        assert (secret.user, secret.group, oct(secret.mode)) == ("root", "root", "0o600"), secret.path


def test_hostkit(target: Target) -> None:
    current = target.host.file(f"{layout.HOSTKIT}/current")
    wanted = hostkit_path(target.plan)
    assert current.linked_to == wanted, "another version of hostkit is the current one"
    files = hostkit_files(target.plan)
    entries = [File(f"{wanted}/{path.relative_to(SOURCE)}", path.read_bytes(), mode="") for path in files]
    assert not differences(target, entries)
    assert "usage: rigctl" in run(target.host, f"{layout.RIGCTL_LINK} --help")


def test_environment_holds_what_its_lock_says(target: Target, environment: str) -> None:
    path = target.state["environments"][environment]
    assert target.host.file(f"{path}/kimi-rig.json").exists, f"{path} is not complete"
    assert target.host.file(f"{PurePosixPath(path).parent}/current").linked_to == path, "`current` is another one"
    # The system's Python reads the names; the environment's own would run what packages put into *.pth files, as root.
    listing = "import glob, sys; from importlib.metadata import distributions as found; "
    listing += "[print(each.name, each.version) for each in found(path=glob.glob(sys.argv[1]))]"
    site = f"{path}/lib/python3.*/site-packages"
    lines = run(target.host, "/usr/bin/python3 -I -S -c %s %s", listing, site).splitlines()
    installed = dict(line.split() for line in lines)
    found = {normalised(name): version for name, version in installed.items()}
    locked = read_lock(run(target.host, "cat %s", f"{path}/{LOCK}"))
    if not rolled_back(target.present):
        assert locked == read_lock((ROOT / target.plan.environments[environment].lock).read_text())
    # A kernel library of ours is over the lock's, or beside it (test_kernel_libraries).
    kernel = json.loads(run(target.host, "cat %s 2>/dev/null || echo {}", f"{path}/{KERNEL_RECORD}"))
    locked |= {kernel["package"]: kernel["version"]} if kernel else {}
    wrong = [
        f"{name} {found.get(name, 'missing')} (lock: {version})"
        for name, version in locked.items()
        if found.get(name) != version
    ]
    assert not wrong, f"{path}: {'; '.join(wrong)}"
    assert not (extra := found.keys() - locked.keys()), f"{path} holds packages of no lock: {', '.join(sorted(extra))}"


def test_nobody_but_root_can_write_an_environment(target: Target, environment: str) -> None:
    """But for uv's own lock, an empty file, which the uv of 0.2.0 left open to all."""
    path = target.state["environments"][environment]
    theirs = run(target.host, r"find %s ! -name .lock \( ! -user root -o ! -type l -perm /022 \) -print -quit", path)
    assert not theirs, (
        f"{theirs.strip()} can be written by others: remove {path} and deploy again, which builds it anew"
    )


def test_environment_has_not_drifted(target: Target, environment: str) -> None:
    """Quick: sizes and times of every file against the record of the full proof at installation."""
    path = target.state["environments"][environment]
    result = target.host.run(shlex.join(["rigctl", "drift", "check", "--json", "--env", path]))
    assert result.stdout.startswith("{"), f"{path}: rigctl does not say whether it drifted: {result.stderr.strip()}"
    report = json.loads(result.stdout)
    findings = [f"{each['where']}: {each['what']}" for each in report["findings"] if each["severity"] == "drift"]
    assert not findings, f"{path}: {'; '.join(findings)}"


def test_engine_variables_are_read(target: Target, environment: str, warnings: list[str]) -> None:
    """A variable that no file of the engine mentions is told, as the deploy tells it."""
    proof = json.loads(run(target.host, f"cat {layout.PROOFS}/{environment}-????????????????"))
    for variable in proof["unread_variables"]:
        warnings.append(f"{target.name}: {variable} is read nowhere in {environment}: mistyped, or of another version")


def test_kernel_libraries(target: Target) -> None:
    """What is installed is what the store holds for these inputs, file by file; its code is for this host's GPUs."""
    if rolled_back(target.present):
        return
    files = [File(path, content) for path, content in kernel_files(target.plan).items()]
    assert not differences(target, files)
    for name, (_, kernel) in kernels(target.plan).items():
        state = json.loads(target.host.run(f"rigctl kernel status {name} --json").stdout)
        wanted = {"source": "installed", "wheel": "wheel"}[kernel.mode]
        assert state["state"] == wanted, f"{kernel.package} of {name}: {state['state']}: {state['why']}"


def test_locks_and_patches(target: Target) -> None:
    assert not differences(target, [File(path, content) for path, content in engine_files(target.plan).items()])


def test_checkpoint(target: Target, checkpoint: str) -> None:
    path = target.plan.checkpoint_paths[checkpoint]
    source = target.plan.checkpoints[checkpoint].source
    assert target.host.file(f"{path}/config.json").exists, f"{checkpoint} is not at {path}"
    verify = target.host.run(f"rigctl checkpoints verify {checkpoint}")
    assert verify.rc == 0, verify.stdout + verify.stderr
    if isinstance(source, GeneratorSource):
        files = generated(source.generator)
        assert not differences(target, [File(f"{path}/{name}", data, mode="") for name, data in files.items()])
    readable = target.host.run("runuser -u %s -- head -c 1 %s", target.plan.data.service_user, f"{path}/config.json")
    assert readable.rc == 0, f"{target.plan.data.service_user} cannot read {path}"


def test_drafters_fit(target: Target) -> None:
    wanted = pairs(target.plan)
    judged = target.host.run(f"rigctl checkpoints pairs --json {shlex.quote(json.dumps(wanted.document()))}")
    assert judged.rc == 0, judged.stderr
    found = [json.loads(line) for line in judged.stdout.splitlines()]
    assert [one["name"] for one in found] == [pair.name for pair in wanted.pairs]
    assert not [one for one in found if one["overlay"] == "absent"], "an overlay is not as its drafter's entry says"


def test_checkpoint_specifications(target: Target) -> None:
    assert not differences(target, [File(path, data) for path, data in checkpoint_files(target.plan).items()])


def test_unit_files(target: Target) -> None:
    assert not differences(target, [File(path, text.encode()) for path, text in target.state["files"].items()])


def test_unit_is_loaded_as_written(target: Target, configuration: str) -> None:
    unit = layout.unit_name(configuration)
    properties = target.host.service(unit).systemd_properties
    assert properties.get("LoadState") == "loaded", f"{unit}: {properties.get('LoadState')}"
    assert properties["NeedDaemonReload"] == "no", f"{unit} changed on disk since systemd read it"
    assert not properties.get("DropInPaths"), f"{unit} is changed by {properties['DropInPaths']}"
    assert properties["User"] == target.plan.data.service_user
    assert set(conflicts(target.plan, configuration)) <= set(properties["Conflicts"].split()), "it is not exclusive"
    boot = configuration in target.plan.data.at_boot
    assert properties["UnitFileState"] == ("enabled" if boot else "disabled"), f"{unit}: start at boot"
    complaint = target.host.run(f"systemd-analyze verify {layout.UNITS}/{unit}")
    assert complaint.rc == 0, complaint.stderr


def test_no_stray_units(target: Target) -> None:
    listed = run(target.host, f"ls -1 {layout.UNITS}").split()
    strays = {name for name in listed if name.startswith("kimi-") and name.endswith(".service")}
    strays -= {PurePosixPath(path).name for path in target.state["files"]} | {ACS_UNIT, POWER_UNIT}
    assert not strays, f"units of no configuration: {', '.join(sorted(strays))}"


def test_what_runs(target: Target, configuration: str, remarks: list[str]) -> None:
    """A stopped configuration is fine; one that runs must be the deployed one, answer, and be kimi's alone."""
    unit = layout.unit_name(configuration)
    properties = target.host.service(unit).systemd_properties
    assert properties["ActiveState"] != "failed", f"{unit} failed: {properties['StatusText']}"
    if properties["ActiveState"] != "active":
        if configuration in target.plan.data.at_boot:
            remarks.append(f"{target.name}: {unit} starts at boot and is {properties['ActiveState']}")
        return
    [row] = [row for row in json.loads(run(target.host, "rigctl status --json")) if row["name"] == configuration]
    started_as = {row["started"]["digest"], *row["started"].get("same_as", [])} if row["started"] else set()
    assert started_as.intersection(known_as(target.state)[configuration]), (
        f"{unit} is stale, it was started before the last deploy: `systemctl restart {unit}` takes the deploy over"
    )
    assert not row["stale"], f"{unit} is stale: {row['remarks'][0]}"
    entry = target.plan.serving[configuration]
    listening = run(target.host, f"ss -Hltn 'sport = :{entry.listen.port}'").split()
    assert f"{entry.listen.host}:{entry.listen.port}" in listening, (
        f"{unit} does not listen where it should: {listening}"
    )
    # An engine shares its port without a word: what else listens there answers some of its requests.
    free = json.loads(target.host.run("rigctl free --json").stdout)
    others = [found["command"] for found in free["processes"] if f"port {entry.listen.port}" in found["holds"]]
    assert not others, f"{unit} is not alone on its port: {others}; `rigctl free` names who"
    assert target.host.process.filter(user=target.plan.data.service_user), f"{unit} runs as another user"
    answer = run(target.host, f"rigctl chat --json --configuration {configuration} 'Say hello.'")
    assert '"content": ""' not in answer, f"{unit} answers nothing"


def test_the_quality_canary_has_passed(target: Target, warnings: list[str]) -> None:
    """Of what runs: its release, flags, KV cache and drafter."""
    for row in json.loads(run(target.host, "rigctl status --json")):
        known, name = row.get("canary") or {}, row["name"]
        if row["state"] != "active" or name not in target.plan.serving:
            continue
        if not known.get("present"):
            warnings.append(
                f"{target.name}: {name} runs with a release, flags, cache or drafter that no quality canary was asked "
                f"about: `rigctl canary {name}` on the host"
            )
        elif known["verdict"] == "worse":
            warnings.append(f"{target.name}: the quality canary of {name} was worse: {'; '.join(known['reasons'][:2])}")


NOT_THERE = ["/", "/health", "/metrics", "/invocations", "/tokenize", "/openapi.json", "/v1/embeddings"]
"""Paths of engines that are nobody's business beyond the host; counters are for named networks, never for the host."""


def test_edge_runs_as_deployed(target: Target) -> None:
    if UNIT not in target.state["files"]:
        return
    for name in target.plan.edge.packages if target.plan.edge else ["haproxy"]:
        assert target.host.package(name).is_installed, f"package {name} is missing"
    properties = target.host.service(layout.EDGE_UNIT).systemd_properties
    assert properties["ActiveState"] == "active", f"{layout.EDGE_UNIT} is {properties['ActiveState']}"
    assert properties["UnitFileState"] == "enabled", f"{layout.EDGE_UNIT} does not start at boot"
    assert properties["NeedDaemonReload"] == "no" and not properties.get("DropInPaths"), (
        f"{layout.EDGE_UNIT} is changed"
    )
    assert properties["User"] == layout.EDGE_USER
    read = [path for path in target.state["files"] if path.startswith(f"{layout.EDGE}/")]
    newer = run(target.host, shlex.join(["python3", "-c", CHANGED, layout.EDGE_UNIT, *read, KEYS, ENGINE, CERTIFICATE]))
    assert not newer, f"{layout.EDGE_UNIT} has not read {newer.split()} again: deploy again"
    for path in (KEYS, ENGINE):
        file = target.host.file(path)
        assert (file.user, file.group, oct(file.mode)) == ("root", layout.EDGE_USER, "0o640"), path


def test_edge_lets_in_whom_the_data_names(target: Target) -> None:
    """The host has the digests of these keys and of no other: a revoked one is gone."""
    if target.plan.edge is None or rolled_back(target.present):
        return
    stored = {line.split()[1]: line.split()[0].lower() for line in run(target.host, f"cat {KEYS}").splitlines()}
    assert stored.keys() == target.plan.edge.keys.keys(), "the edge has other keys than the host's data: deploy again"
    known = {name: source for name, source in target.plan.edge.keys.items() if source != PROMPT}
    wrong = [name for name, source in known.items() if stored[name] != key_digest(source, f"edge.keys.{name}")]
    assert not wrong, f"the edge has another key {', '.join(wrong)} than the host's data: deploy again"


def test_edge_is_all_that_others_reach(target: Target) -> None:
    """Asked on the host itself: TLS, keys and paths of the edge, and every other port of our units."""
    edge = target.plan.edge
    if edge is None or rolled_back(target.present):
        return
    places = [{"address": one.nearby, "port": one.port} for one in edge.listeners]
    metrics = [path for path in NOT_THERE if path != "/metrics" or not edge.metrics_networks]
    asked = json.dumps({"unit": layout.EDGE_UNIT, "listeners": places, "tls": edge.tls is not None, "paths": metrics})
    probe = (ROOT / "tests/host/edge_probe.py").read_text()
    found = json.loads(run(target.host, shlex.join(["python3", "-c", probe, asked])))
    others = found.pop("others")
    assert not others, f"reached beyond loopback, and not through the edge: {', '.join(others)}"
    for place, answers in found.items():
        assert set(answers["spoken"]) <= {"TLSv1.2", "TLSv1.3"}, f"{place} speaks {answers['spoken']}"
        assert answers["spoken"] or edge.tls is None, f"{place} speaks no TLS"
        assert not edge.keys or answers["no key"] == answers["wrong key"] == 401, f"{place} asks for no key: {answers}"
        there = [path for path, status in answers["paths"].items() if status != 404]
        assert not there, f"{place} lets {', '.join(there)} through"


def test_receipt(target: Target) -> None:
    found = json_of(target.host, layout.RECEIPT)["items"]
    items = {name: {key: value for key, value in item.items() if key != "since"} for name, item in found.items()}
    wanted = {
        key: item for key, item in receipt_items(target.plan, hostkit_path(target.plan)).items() if not of_state(key)
    }
    assert items == {**wanted, **target.state["items"]}


def test_limits_of_the_box(target: Target, not_enforced: dict[str, list[str]]) -> None:
    """A box that cannot enforce a limit says so; the run's last lines tell."""
    limits = target.host.file(f"{layout.ETC}/box-limits.json")
    if limits.exists:
        found = json_of(target.host, limits.path)
        not_enforced[target.name] = [name for name, limit in found["limits"].items() if not limit["enforced"]]
        assert set(found["limits"]), "the box was not probed"


def differences(target: Target, entries: Sequence[Directory | File | Link]) -> list[str]:
    """In words how the host differs; `mode=""` leaves owner and mode open."""
    found: list[str] = []
    for entry in entries:
        file = target.host.file(entry.path)
        if not file.exists:
            found.append(f"{entry.path} is missing")
        elif isinstance(entry, Link):
            if not file.is_symlink or run(target.host, "readlink %s", entry.path).strip() != entry.target:
                found.append(f"{entry.path} does not point to {entry.target}")
        else:
            if isinstance(entry, File) and file.sha256sum != entry.digest:
                found.append(f"{entry.path}: content differs")
            if entry.mode and (state := f"{file.mode:04o} {file.user}:{file.group}") != (
                wanted := f"{entry.mode} {entry.owner}:{entry.group}"
            ):
                found.append(f"{entry.path}: {state} (not {wanted})")
    return found
