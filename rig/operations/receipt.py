"""Write the receipt: the last thing a deploy does, so a receipt never says more than is there."""

import json
import subprocess
from functools import cache

from pyinfra import host
from pyinfra.api import operation

from rig.artifacts.receipt import FORMAT, merged, receipt_items
from rig.catalog.entries import ROOT
from rig.facts.state import JsonFile
from rig.operations.common import Commands, changes, now, operator, reached, refuse
from rig.operations.files import File, write
from rig.operations.hostkit import hostkit_path
from rig.plan.host_plan import HostPlan
from rigctl.contract import layout


@operation()
def readable() -> Commands:
    """No newer version of kimi-rig has deployed here: this one would not know what that one has changed."""
    found = host.get_fact(JsonFile, path=layout.RECEIPT)
    written = found.get("format") if isinstance(found, dict) else FORMAT
    if isinstance(written, int) and written > FORMAT:
        yield from refuse(
            f"{layout.RECEIPT} has format {written}, newer than this version of kimi-rig reads (up to {FORMAT}): "
            f"deploy with {found.get('version')}, which wrote it, or with a newer one"
        )
        return
    host.noop("no newer version has deployed here")


@operation()
def receipt(plan: HostPlan) -> Commands:
    """The receipt on the host says what this deploy installed."""
    reached()
    new = merged(
        host.get_fact(JsonFile, path=layout.RECEIPT),
        receipt_items(plan, hostkit_path(plan)),
        now=now(),
        by=operator(),
        version=product_version(),
    )
    details = [f"{layout.RECEIPT} is brought up to date"] if new else []
    if not changes(details, f"{layout.RECEIPT} is up to date"):
        return
    yield write(File(layout.RECEIPT, json.dumps(new, indent=2).encode() + b"\n"), existed=False)


@cache
def product_version() -> str:
    """The commit this repository stands at, "-dirty" with local changes, or "unknown" outside or without git."""
    describe = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        result = subprocess.run(describe, capture_output=True, errors="replace", check=False)
    except OSError:
        return "unknown"
    return result.stdout.strip() if result.returncode == 0 else "unknown"
