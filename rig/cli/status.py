"""`kimi-rig status`: one line a host: what serves, since when, how its drafter does, drift, pending reboot.

One ssh command a host, all hosts at once. Drift is what can be found cheaply: the host's receipt against this
repository, and recorded files that are gone. `kimi-rig verify` proves the rest.
"""

import json
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import click
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from rig.artifacts.disk import disk
from rig.artifacts.receipt import receipt_items
from rig.artifacts.rollback_states import rollback_text, rolled_back
from rig.catalog.entries import check_all
from rig.catalog.yaml_source import CatalogError
from rig.cli import ssh
from rig.cli.arguments import FAILED, inventory, limit, verb
from rig.cli.connect import ssh_words
from rig.cli.converge import asked_hosts, inventory_hosts, ssh_config
from rig.facts.report import HostReport
from rig.host.disk import size
from rig.host.settings import HostSettings
from rig.operations.hostkit import hostkit_path
from rig.plan.host_plan import host_plan, questions
from rigctl.contract import layout
from rigctl.contract.foreign import one_line
from rigctl.contract.order import faults

SECONDS = 40


_SCRIPT = f"""export {" ".join(f"{key}={value}" for key, value in layout.LOCALE.items())}
section() {{ printf '\\n== %s\\n' "$1"; }}
section system; ( . /etc/os-release; echo "$ID-$VERSION_ID" )
section receipt; cat {layout.RECEIPT}
section rigctl; {layout.RIGCTL} status --json
section state; cat {layout.PRESENT_STATE}
section pending; cat {layout.REBOOT_PENDING}
section health; journalctl -k -b -q -o cat --no-pager -n 3 -g 'NVRM: Xid' 2>/dev/null |
sed -n 's/.*Xid (\\(PCI:[0-9A-Fa-f:.]*\\)): \\([0-9]*\\).*/Xid \\2 (\\1)/p'
timeout 10 nvidia-smi --format=csv,noheader,nounits \
--query-gpu=index,ecc.errors.uncorrected.volatile.total,pcie.link.width.current,pcie.link.width.max 2>/dev/null |
awk -F', ' '$2 ~ /^[1-9]/ {{ print "card " $1 ": " $2 " uncorrectable memory errors" }}
$3+0 < $4+0 {{ print "card " $1 ": " $3 " of " $4 " lanes" }}'
for device in /sys/bus/pci/drivers/nvidia/*:*; do for kind in fatal nonfatal; do
awk -v at="${{device##*/}}" -v kind="$kind" '/^TOTAL_ERR/ && $2 > 0 {{ print at ": " $2 " " kind " PCIe errors" }}' \
"$device/aer_dev_$kind" 2>/dev/null; done; done
section missing; while read -r kind name; do case $kind in file|link|tree)
[ -e "$name" ] || [ -L "$name" ] || echo "$name";; esac; done < {layout.CREATED}
section disk
"""
DISK_SECONDS = 15
"""For counting what lies on the disks: 200,000 files take two seconds once their directories are in memory."""


@dataclass(frozen=True)
class Service:
    """A configuration that runs. accepted_since: UTC. running_release: where the host has written it down."""

    configuration: str
    state: str
    release: str | None = None
    running_release: str | None = None
    accepted_since: str | None = None
    acceptance_length: float | None = None
    model: str | None = None
    address: str | None = None

    def text(self, among: int = 1) -> str:
        """It in a few words; the deployed release too where it is not the one that runs, the model among several."""
        runs = self.running_release or self.release
        deployed = f"; deployed: {self.release}" if runs != self.release else ""
        which = f" with {self.model} at {self.address}" if among > 1 and self.address else ""
        text = f"{self.configuration}{which} {self.state} ({runs}{deployed})"
        text += f", accepted since {self.accepted_since}" if self.accepted_since else ""
        return text + (
            f", acceptance length {self.acceptance_length:.2f}" if self.acceptance_length is not None else ""
        )


@dataclass(frozen=True)
class HostStatus:
    """One host, with every configuration that runs. drift: findings, in words."""

    host: str
    reached: bool = True
    trouble: str = ""
    services: list[Service] = field(default_factory=list)
    deployed: str | None = None
    drift: list[str] = field(default_factory=list)
    reboot_pending: str = ""
    rolled_back: str = ""
    health: list[str] = field(default_factory=list)
    """What cards and links reported on this boot."""
    disk: list[dict[str, Any]] = field(default_factory=list)
    """Its file systems (`document` of rig/host/disk.py)."""

    def line(self) -> str:
        """The host in one line."""
        if not self.reached:
            return f"{self.host}: cannot be reached: {self.trouble}"
        if self.deployed is None:
            return f"{self.host}: nothing is deployed"
        parts = [one.text(among=len(self.services)) for one in self.services] or ["nothing serves"]
        parts += [self.rolled_back] if self.rolled_back else []
        parts.append(f"drift: {'; '.join(self.drift) or 'none'}")
        parts.append(f"reboot pending: {self.reboot_pending or 'no'}")
        parts += [f"health: {'; '.join(self.health)}"] if self.health else []
        disks = (f"{one['mount']} {size(one['free'])} free of {size(one['size'])}" for one in self.disk)
        parts += [f"disk: {'; '.join(disks)}"] if self.disk else []
        parts += [f"no room: {one['shortage']}" for one in self.disk if not one["fits"]]
        return f"{self.host}: {', '.join(parts)}"


class _Row(BaseModel):
    """What is read of a configuration's row in `rigctl status --json`. A host may say anything."""

    name: str
    state: str
    status: str = ""
    stale: bool = False
    digest: str | None = None
    release: str | None = None
    running_release: str | None = None
    accepted_at: Annotated[float, Field(ge=0, lt=1e11, allow_inf_nan=False)] | None = None
    acceptance_length: Annotated[float, Field(allow_inf_nan=False)] | None = None
    model: str | None = None
    address: str | None = None


_ROWS = TypeAdapter(list[_Row])


def read_status(name: str, data: Mapping[str, Any], output: str) -> HostStatus:
    """Make sense of what the host said. Pure but for the catalogues. Raises CatalogError for wrong host data."""
    sections = _sections(output)
    receipt = _json(sections.get("receipt", ""))
    if not isinstance(receipt, dict):
        return HostStatus(name)
    rows, silent = _rows(_json(sections.get("rigctl", "")))
    present = _json(sections.get("state", ""))
    return HostStatus(
        name,
        services=[_service(row) for row in rows or [] if row.state not in ("inactive", "failed")],
        deployed=f"{receipt.get('version')} at {receipt.get('at')}",
        drift=[*_drift(data, sections, receipt, rows or []), *([silent] if silent else [])],
        rolled_back=rollback_text(present) if rolled_back(present) else "",
        reboot_pending="; ".join(sections.get("pending", "").split("\n")),
        health=[line for line in sections.get("health", "").splitlines() if line],
        disk=_disk(data, sections),
    )


def _rows(found: Any) -> tuple[list[_Row] | None, str]:
    """The rows of `rigctl status`, and why there are none."""
    if found is None:
        return None, "rigctl does not answer"
    try:
        return _ROWS.validate_python(found), ""
    except ValidationError as error:
        return None, one_line(f"rigctl answers in another form: {next(iter(faults(error, _Row, found)))}")


def _service(row: _Row) -> Service:
    since = f"{datetime.fromtimestamp(row.accepted_at, UTC):%Y-%m-%d %H:%M} UTC" if row.accepted_at else None
    return Service(
        row.name, row.state, row.release, row.running_release, since, row.acceptance_length, row.model, row.address
    )


def _drift(
    data: Mapping[str, Any], sections: Mapping[str, str], receipt: Mapping[str, Any], rows: Sequence[_Row]
) -> list[str]:
    """rows: what `rigctl status` says of each configuration."""
    plan = host_plan(data, sections.get("system", ""), HostSettings())
    wanted = receipt_items(plan, hostkit_path(plan))
    items = receipt.get("items")
    found = {key: item for key, item in items.items() if isinstance(item, dict)} if isinstance(items, dict) else {}
    differs = [key for key in sorted({*wanted, *found}) if not _same(key, wanted.get(key), found.get(key))]
    digests = {f"unit/{layout.unit_name(row.name)}": row.digest for row in rows if row.digest}
    differs += [unit for unit, digest in digests.items() if unit in found and found[unit].get("digest") != digest]
    lines = [f"a deploy would change {', '.join(dict.fromkeys(differs))}"] if differs else []
    lines += [f"{path} is missing" for path in sections.get("missing", "").splitlines() if path]
    lines += [f"{row.name} is stale" for row in rows if row.stale]
    unusable = (row for row in rows if row.digest is None and "digest" in row.model_fields_set)
    lines += [f"{row.name}: {row.status}" for row in unusable]
    return lines


def _disk(data: Mapping[str, Any], sections: Mapping[str, str]) -> list[dict[str, Any]]:
    """The host's file systems under its plan; none where they could not be read."""
    facts = HostReport().process([sections.get("disk", "")])
    plan = replace(host_plan(data, sections.get("system", ""), HostSettings()), facts=facts)
    return [one.document() for one in disk(plan)]


def _same(key: str, wanted: Any, found: Any) -> bool:
    if wanted is None or found is None:
        return False
    # A unit's digest depends on the host's hardware: the host compares it with its own files.
    return key.startswith("unit/") or {k: v for k, v in found.items() if k != "since"} == wanted


def _sections(output: str) -> dict[str, str]:
    parts = output.split("\n== ")[1:]
    return {name.strip(): text.strip() for name, _, text in (part.partition("\n") for part in parts)}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def ask(name: str, data: Mapping[str, Any], config: Path) -> HostStatus:
    """Read one host's status. Never raises for a host that does not answer. config: rig/cli/ssh.py's file."""
    if name.startswith("@") and name != "@local":
        return HostStatus(name, reached=False, trouble="no machine stands behind this name (pyinfra's connectors)")
    shell = ["sudo", "-n", "sh", "-s"] if data.get("_sudo") else ["sh", "-s"]
    command = shell if name == "@local" else [*ssh.words(config, name), shlex.join(shell)]
    try:
        counted = HostReport().command({**questions(data), "only_disk": True, "timeout": DISK_SECONDS})
        script = f"{_SCRIPT}{counted}\nexit 0\n"
        result = ssh.limited(command, script.encode(), SECONDS)
    except (subprocess.TimeoutExpired, OSError, CatalogError) as error:
        return HostStatus(name, reached=False, trouble=_why(error))
    if result.returncode != 0:
        endless = abs(result.returncode) % 128 == signal.SIGXFSZ
        errors = result.stderr.decode(errors="replace").strip()
        words = "its answer has no end" if endless else errors or f"exit code {result.returncode}"
        trouble = words.splitlines()[-1]
        if name != "@local":
            trouble = ssh.refused(config, name, words, shlex.join(ssh_words(name, data)))
        return HostStatus(name, reached=False, trouble=trouble)
    try:
        return read_status(name, data, result.stdout.decode(errors="replace"))
    except CatalogError as error:
        return HostStatus(name, reached=False, trouble=str(error))


def _why(error: subprocess.TimeoutExpired | OSError | CatalogError) -> str:
    if isinstance(error, OSError):
        return f"it cannot be asked from here: {error}"
    return f"no answer in {SECONDS} s" if isinstance(error, subprocess.TimeoutExpired) else str(error)


def status(inventory: str, limits: Sequence[str]) -> list[HostStatus]:
    """The status of every host asked for, in the inventory's order. Raises RunFailed, CatalogError."""
    names = asked_hosts(inventory, limits)
    data = {host["name"]: host["data"] for host in inventory_hosts(inventory)}
    config = ssh_config(inventory)
    with ThreadPoolExecutor(max_workers=8) as pool:
        return list(pool.map(lambda name: ask(name, data[name], config), names))


@verb("status")
@inventory
@limit
@click.option("--json", "as_json", is_flag=True, help="The same as one JSON list.")
def status_command(inventory: str, limits: Sequence[str], *, as_json: bool) -> int:
    """Print one line for each host of INVENTORY: what serves, since when, how its drafter does, drift, pending reboot.

    Reads only. Exit codes: 0 every host answered, 1 one did not, or a failure.
    """
    check_all()
    found = status(inventory, limits)
    print(json.dumps([asdict(one) for one in found], indent=2) if as_json else lines(found))
    return 0 if all(one.reached for one in found) else FAILED


def lines(found: Sequence[HostStatus]) -> str:
    """One line a host."""
    return "\n".join(one.line() for one in found)
