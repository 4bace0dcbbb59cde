"""`kimi-rig plan` and `kimi-rig deploy`: pyinfra's own command line, with exit codes that can be trusted.

pyinfra exits 0 for a mistyped inventory, a limit that matches nothing, an interrupt and a host that dropped out of
several. So the wrapper counts hosts itself, lets every dry run say which hosts it got through (KIMI_RIG_PLAN_LOG), and
calls a deploy converged only when a dry run after it finds nothing left to do.

Exit codes: 0 converged (deploy) or nothing to do (plan); 1 failed; 2 something would change (plan); 3 converged as far
as a pending reboot allows; 64 wrong usage.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import click

from rig.catalog.entries import ROOT, check_all
from rig.catalog.yaml_source import CatalogError
from rig.cli import ssh
from rig.cli.arguments import (
    CONVERGED,
    FAILED,
    REBOOT_PENDING,
    WOULD_CHANGE,
    end_with_parent,
    inventory,
    limit,
    limit_options,
    verb,
)
from rig.cli.connect import talk_text
from rig.cli.progress import Progress, verbose
from rig.operations.common import PLAN_LOG, REFUSED
from rig.plan.host_plan import chosen_serving, reached, refuse_unknown
from rig.plan.secrets import PROMPT, ask, hand_on, read_certificate, read_certificates, read_secret
from rigctl.errors import RigctlError

SECRETS = {"api_key_file": "API key for the engines", "hub_token_file": "token for the model hub"}
"""Host data that may say "prompt", and what the operator is asked for."""

DEPLOY_FILE = "deploy.py"

EXAMPLE = re.compile(r"(^|\.)example\.(com|net|org)$")  # RFC 2606: never a real host


class RunFailed(RigctlError):
    """A run that cannot be trusted to have done what was asked. The message is for the operator."""


@dataclass
class Change:
    """One operation that would change one host, with what it found."""

    host: str
    operation: str
    details: list[str] = field(default_factory=list)


@dataclass
class Plan:
    """What a dry run found.

    By host: why a reboot is pending, notices of what a deploy would disturb or keep, findings of the preflight that do
    not end it, and its file systems (`document` of rig/host/disk.py).
    """

    hosts: list[str]
    changes: list[Change]
    pending: dict[str, str] = field(default_factory=dict)
    notices: dict[str, list[str]] = field(default_factory=dict)
    findings: dict[str, list[str]] = field(default_factory=dict)
    disk: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def refusals(self) -> list[str]:
        """Details that a deploy would end with."""
        return [
            f"{c.host}: {d.removeprefix(REFUSED)}" for c in self.changes for d in c.details if d.startswith(REFUSED)
        ]

    def exit_code(self, when_changed: int) -> int:
        """The exit code that says this plan; when_changed if something is left to do."""
        if self.refusals:
            return FAILED
        if self.changes:
            return when_changed
        return REBOOT_PENDING if self.pending else CONVERGED

    def text(self) -> str:
        """The plan for people."""
        lines: list[str] = []
        for host in self.hosts:
            mine = [change for change in self.changes if change.host == host]
            lines.append(f"{host}: {f'{len(mine)} operations would change it' if mine else 'nothing to do'}")
            for change in mine:
                lines.append(f"  {change.operation}")
                lines += [f"    - {detail}" for detail in change.details]
            lines += [f"  note: {text}" for text in self.notices.get(host, [])]
            lines += [f"  {text}" for text in self.findings.get(host, [])]
            lines += [f"  {text}" for one in self.disk.get(host, []) for text in one["lines"]]
            if host in self.pending:
                lines.append(f"  reboot pending: {self.pending[host]}")
        return "\n".join(lines)


def pyinfra(*arguments: str) -> list[str]:
    """The command line of pyinfra in this repository and interpreter."""
    return [sys.executable, "-m", "pyinfra", "--chdir", str(ROOT), *arguments]


@cache
def inventory_hosts(inventory: str) -> list[dict[str, Any]]:
    """Every host of an inventory with its groups and data, as pyinfra itself sees them.

    Raises RunFailed for an inventory that does not exist, cannot be read or names no host.
    """
    if not (ROOT / inventory).is_file():
        raise RunFailed(f"there is no inventory file {inventory}; inventories lie in inventory/")
    result = subprocess.run(
        pyinfra(inventory, "debug-inventory", "--json"), capture_output=True, errors="replace", check=False, cwd=ROOT
    )
    if result.returncode != 0 or not result.stdout.strip():
        said = [line for line in result.stderr.strip().splitlines() if not line.startswith("-->")]
        raise RunFailed(f"{inventory} cannot be read:\n" + "\n".join(said).strip())
    try:
        hosts: list[dict[str, Any]] = json.loads(result.stdout)
    except ValueError:
        raise RunFailed(f"{inventory} cannot be read: it, or its group data, prints something of its own") from None
    if not hosts:
        raise RunFailed(f"{inventory} names no host")
    return hosts


def asked_hosts(inventory: str, limits: Sequence[str]) -> list[str]:
    """Names of the hosts a run is asked to bring to their state, by pyinfra's rules for --limit.

    Raises RunFailed when a limit matches nothing, a host's data has a key nobody reads, or its SSH key does not exist.
    """
    hosts = inventory_hosts(inventory)
    chosen = [host["name"] for host in hosts] if not limits else _limited(hosts, inventory, limits)
    for host in hosts:
        if host["name"] not in chosen:
            continue
        if EXAMPLE.search(str(host["data"].get("ssh_hostname") or host["name"])):
            raise RunFailed(
                f"{inventory} still names the example host {host['name']}: "
                "docs/first-steps/first-host.md says what to fill in"
            )
        try:
            refuse_unknown(host["data"])
        except CatalogError as error:
            raise RunFailed(f"{host['name']}: {error}") from None
        key = host["data"].get("ssh_key")
        if key and not Path(key).expanduser().exists():
            cure = (
                "`make sandbox` makes it" if host["data"].get("ssh_config_file") else "correct ssh_key in the inventory"
            )
            raise RunFailed(f"{host['name']}: its SSH key {key} does not exist: {cure}")
    return chosen


def check_values(inventory: str, names: Sequence[str]) -> None:
    """Validate what needs no connection of the hosts' data. Raises RunFailed, SecretError."""
    for host in inventory_hosts(inventory):
        data = host["data"]
        if host["name"] not in names:
            continue
        try:
            found, serving, _ = chosen_serving(data)
            edge, _ = reached(found, serving)
        except CatalogError as error:
            raise RunFailed(f"{host['name']}: {error}") from None
        for key, what in SECRETS.items():
            if data.get(key) not in (None, PROMPT):
                read_secret(data[key], what)
        if edge is not None:
            for key, file in edge.key_files.items():
                read_secret(file, f"edge.keys.{key}")
            tls = edge.tls
            if tls is not None and tls.certificate and tls.key:
                read_certificate(tls.certificate, tls.key)
            if tls is not None and tls.acme and tls.acme.roots:
                read_certificates(tls.acme.roots)
        for name, entry in serving.items():
            for variable, file in entry.secrets.items():
                read_secret(file, f"serving.{name}.secrets.{variable}")


def _limited(hosts: list[dict[str, Any]], inventory: str, limits: Sequence[str]) -> list[str]:
    chosen: list[str] = []
    for one in limits:
        matching = [host["name"] for host in hosts if one in host["groups"] or fnmatch(host["name"], one)]
        if not matching:
            names = ", ".join(host["name"] for host in hosts)
            raise RunFailed(f"--limit {one} matches no host of {inventory} (there are: {names})")
        chosen += [name for name in matching if name not in chosen]
    return chosen


@cache
def _prompted(inventory: str) -> tuple[str, ...]:
    """pyinfra options that hand on what the operator types, asked once for all hosts and runs."""
    options: list[str] = []
    for key, what in SECRETS.items():
        if any(host["data"].get(key) == PROMPT for host in inventory_hosts(inventory)):
            options += ["--data", f"{key}={hand_on(ask(what))}"]
    return tuple(options)


def ssh_config(inventory: str) -> Path:
    """The file by which every verb reaches the hosts of an inventory (rig/cli/ssh.py). Raises RunFailed."""
    try:
        return ssh.config_of(inventory_hosts(inventory))
    except ssh.WayError as error:
        raise RunFailed(str(error)) from None


def run_pyinfra(
    inventory: str,
    limits: Sequence[str],
    deploy_file: str,
    *extra: str,
    set_: Mapping[str, str] | None = None,
    **more: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a deploy file on the hosts asked for. pyinfra's exit code is 0 for some failures too. Raises RunFailed.

    set_: environment variables.
    """
    command, settings = _command(inventory, limits, deploy_file, *extra, set_=set_ or {})
    return subprocess.run(command, check=False, errors="replace", **settings, **more)


def _command(
    inventory: str, limits: Sequence[str], deploy_file: str, *extra: str, set_: Mapping[str, str]
) -> tuple[list[str], dict[str, Any]]:
    options = [*limit_options(limits), "--data", f"ssh_config_file={ssh_config(inventory)}"]
    if deploy_file == DEPLOY_FILE:
        options += _prompted(inventory)
    # Descriptors of handed-on secrets are the only inheritable ones.
    settings = {"cwd": ROOT, "close_fds": False, "preexec_fn": end_with_parent}
    return pyinfra(*options, *extra, inventory, deploy_file), {
        **settings,
        "env": {"PYINFRA_PROGRESS": "off", **os.environ, **set_},
    }


def follow_pyinfra(
    progress: Progress,
    inventory: str,
    limits: Sequence[str],
    deploy_file: str,
    *extra: str,
    set_: Mapping[str, str] | None = None,
) -> int:
    """Run a deploy file for good; pyinfra's exit code. Its stages are phases of `progress`. Raises RunFailed."""
    often = {"KIMI_RIG_REPORT_SECONDS": "2"} if progress.terminal else {}
    command, settings = _command(inventory, limits, deploy_file, *extra, "-y", set_={**often, **(set_ or {})})
    return progress.follow(command, **settings)


def make_plan(
    inventory: str,
    limits: Sequence[str],
    extra: Sequence[str] = (),
    deploy_file: str = DEPLOY_FILE,
    *,
    quiet: bool = False,
) -> Plan:
    """Find out what a deploy would do. Changes nothing. Raises RunFailed when a host was not looked at whole.

    quiet: what pyinfra says is shown only when it failed.
    """
    hosts = asked_hosts(inventory, limits)
    if deploy_file == DEPLOY_FILE and not extra:  # options may override any data
        check_values(inventory, hosts)
    with tempfile.NamedTemporaryFile("r", prefix="kimi-rig-plan-") as log:
        pipes = {"stdout": subprocess.PIPE, **({"stderr": subprocess.PIPE} if quiet else {})}
        result = run_pyinfra(
            inventory, limits, deploy_file, *extra, "--dry", "--json", set_={PLAN_LOG: log.name}, **pipes
        )
        entries = [json.loads(line) for line in log]
    reached = {entry["host"] for entry in entries if entry.get("reached")}
    if quiet and (result.returncode != 0 or reached.symmetric_difference(hosts)):
        print(result.stderr, file=sys.stderr, end="")
    if missing := [host for host in hosts if host not in reached]:
        raise RunFailed(
            f"no plan for {', '.join(missing)}: not reached, or dropped out; pyinfra's lines above say why, and "
            "`ssh` to it must work without a question"
        )
    if result.returncode != 0 or not result.stdout.strip():
        raise RunFailed(f"pyinfra ended with exit code {result.returncode}")
    return plan_of(hosts, json.loads(result.stdout)["plan"], entries)


def plan_of(hosts: list[str], operations: Iterable[dict[str, Any]], entries: Iterable[dict[str, Any]]) -> Plan:
    """The plan in pyinfra's list of operations and the entries of the plan log."""
    details: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    said: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    disk: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        if "disk" in entry:
            disk[entry["host"]] = entry["disk"]
        if "detail" in entry:
            details[entry["host"], entry["operation"]].append(entry["detail"])
        for kind in ("pending", "notice", "finding"):
            if kind in entry:
                said[kind][entry["host"]].append(entry[kind])
    changes = [
        Change(host, operation["name"], details[host, operation["name"]])
        for operation in operations
        for host in [*operation["hosts_with_change"], *operation["hosts_with_conditional_change"]]
    ]
    pending = {host: texts[-1] for host, texts in said["pending"].items()}
    return Plan(hosts, changes, pending, dict(said["notice"]), dict(said["finding"]), disk)


def change_hosts(
    progress: Progress, inventory: str, limits: Sequence[str], deploy_file: str, extra: Sequence[str] = ()
) -> None:
    """Run a deploy file for good. Raises RunFailed when pyinfra says that it failed."""
    status = follow_pyinfra(progress, inventory, limits, deploy_file, *extra)
    if status != 0:
        raise RunFailed(
            f"pyinfra's exit code is {status}; the next run goes on where this one ended\n{progress.trouble()}"
        )
    progress.end()


_json = click.option("--json", "file", type=Path, help="Where to write the plan; default .plan/<inventory>.json.")
_more = click.option("--pyinfra", "extra", multiple=True, metavar="OPTION", help="A further option for pyinfra.")


@verb("plan")
@inventory
@limit
@_json
@_more
def plan_command(inventory: str, limits: Sequence[str], file: Path | None, extra: Sequence[str]) -> int:
    """Show what a deploy would change on the hosts of INVENTORY (such as inventory/gpu.py). Changes nothing.

    Exit codes: 0 nothing, 2 something, 3 nothing but a reboot is pending, 1 failed, or a deploy would be refused.
    """
    check_all()
    plan = make_plan(inventory, limits, extra)
    print(plan.text(), flush=True)
    _write_json(plan, inventory, file)
    return plan.exit_code(WOULD_CHANGE)


@verb("deploy", "what was begun on the host is finished by the next deploy")
@inventory
@limit
@_json
@_more
@click.option("--reboot", is_flag=True, help="Reboot where boot-time settings wait for it.")
@verbose
def deploy_command(
    inventory: str, limits: Sequence[str], file: Path | None, extra: tuple[str, ...], *, reboot: bool, verbose: bool
) -> int:
    """Bring the hosts of INVENTORY (such as inventory/gpu.py) to the state that it describes.

    A plan comes first: what would be refused at the end is refused before the first step. Another one comes last: only
    with nothing left to do the deploy has succeeded.

    Exit codes: 0 converged, 3 converged as far as a pending reboot allows, 1 failed.
    """
    check_all()
    progress = Progress(f"deploy-{Path(inventory).stem}", verbose=verbose)
    more = ("--data", "reboot=yes") if reboot else ()
    plan = deploy(progress, inventory, limits, (*extra, *more), file)
    print(talk_text(inventory_hosts(inventory), plan.hosts))
    print("converged: " + ", ".join(plan.hosts))
    for host, why in plan.pending.items():
        print(f"{host}: reboot pending: {why}")
    return plan.exit_code(FAILED)


def deploy(
    progress: Progress,
    inventory: str,
    limits: Sequence[str],
    extra: Sequence[str] = (),
    file: Path | None = None,
    changed: Callable[[], object] = lambda: None,
) -> Plan:
    """Deploy, then plan again: only a plan with nothing left to do, which is returned, is success. Raises RunFailed.

    What would be refused at its end, after engines and 595 GB, is refused before its first step. changed: called once
    the hosts are changed, before they are looked at again.
    """
    progress.begin("plan")
    plan = make_plan(inventory, limits, extra, quiet=True)
    if plan.refusals:
        raise RunFailed("refused, nothing was changed on any host:\n" + "\n".join(plan.refusals))
    progress.end(f"{len(plan.changes)} operations would change something")
    before = plan.findings
    print_findings(plan, {})
    if plan.changes:
        change_hosts(progress, inventory, limits, DEPLOY_FILE, extra)
        changed()
        progress.begin("plan again")
        plan = make_plan(inventory, limits, extra, quiet=True)
        progress.end(f"{len(plan.changes)} operations are left")
    _write_json(plan, inventory, file)
    if plan.exit_code(FAILED) == FAILED:
        raise RunFailed(f"not converged, this is left to do:\n{plan.text()}")
    print_notices(plan)
    print_findings(plan, before)
    return plan


def print_findings(plan: Plan, before: Mapping[str, Sequence[str]]) -> None:
    """What the preflight reports and does not refuse, unless an earlier plan has reported it."""
    for host, findings in plan.findings.items():
        for text in findings:
            if text not in before.get(host, []):
                print(f"{host}: {text}")


def print_notices(plan: Plan) -> None:
    """What changes nothing, and is reported at the end of a run."""
    for host, notices in plan.notices.items():
        for text in notices:
            print(f"{host}: note: {text}")


def _write_json(plan: Plan, inventory: str, file: Path | None) -> None:
    path = file or ROOT / ".plan" / f"{Path(inventory).stem}.json"
    document = {**asdict(plan), "refusals": plan.refusals}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        if file:
            raise RunFailed(f"{path} cannot be written: {error.strerror}") from None
        print(f"note: the plan is not kept: {path} cannot be written: {error.strerror}", file=sys.stderr)
