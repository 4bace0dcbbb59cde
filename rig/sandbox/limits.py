"""Which of systemd's limits the box enforces: probed once a box, kept as JSON here and in the box.

The document: `{"kernel": ..., "clock": false, "limits": {"MemoryMax": {"enforced": false, "note": ""}}}`;
`enforced` is null where the probe could not tell. In the box it lies at `IN_BOX`, for verification.
"""

import json
from pathlib import Path
from typing import Any

from rig.sandbox.boot import in_box
from rig.sandbox.box import Box, SandboxError, State, write_atomic

IN_BOX = "/etc/kimi-rig/box-limits.json"
PROBE = Path(__file__).with_name("limits_probe.py")


def probe(box: Box, state: State) -> dict[str, Any]:
    """Probe the running box, store what came out in both places."""
    sudo = "" if state.login == "root" else "sudo "
    done = in_box(box, f"{sudo}python3 -", PROBE.read_text(encoding="utf-8"), timeout=60)
    try:
        document: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        trouble = (done.stderr.strip() or "no output").splitlines()[-1]
        raise SandboxError(f"probing the box's limits failed: {trouble}; run `make sandbox` again") from None
    if document["clock"]:
        raise SandboxError(f"box {box.name} may set this computer's clock; stop it: `make sandbox-stop`")
    text = json.dumps(document, indent=2) + "\n"
    copied = in_box(box, f"{sudo}install -D -m 644 /dev/stdin {IN_BOX}", text)
    if copied.returncode != 0:
        raise SandboxError(f"{IN_BOX} could not be written in the box: {copied.stderr.strip()}")
    write_atomic(box.limits, text)
    return document


def stored(box: Box) -> dict[str, Any] | None:
    """What the probe found, or None when it has not run."""
    try:
        document: dict[str, Any] = json.loads(box.limits.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document


def not_enforced(document: dict[str, Any]) -> list[str]:
    """Names of the limits that do not hold, "?" added where the probe could not tell."""
    found: dict[str, Any] = document["limits"]
    weak = [name for name, result in found.items() if result["enforced"] is False]
    return weak + [f"{name}?" for name, result in found.items() if result["enforced"] is None]
