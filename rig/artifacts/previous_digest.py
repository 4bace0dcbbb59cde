"""The digest by which version 0.3.0 (66d813d) knows a unit: a unit that it started is not stale without a reason.

Keys of the run specification that are newer than 0.3.0 stand in `NEWER` of rigctl/contract/run_specification.py, each
with the value that says what 0.3.0 did. One that counts for the digest has the same name in `started_with`
(rig/artifacts/units.py), or is a limit: it is left out here while it has that value.
"""

from collections.abc import Mapping
from typing import Any

from rig.plan.host_plan import canonical_digest
from rigctl.contract.run_specification import NEWER

REPLACED: Mapping[str, str] = {}
"""Line of a unit's [Service] section -> the line that 0.3.0 wrote instead; "": it had none."""


def digest(started_with: Mapping[str, Any]) -> str:
    """started_with: what a unit is started with now (rig/artifacts/units.py)."""
    limits = [[path.removeprefix("limits."), value] for path, value in NEWER.items() if path.startswith("limits.")]
    lines = (REPLACED.get(line, line) for line in started_with["service"])
    content = {name: value for name, value in started_with.items() if name not in NEWER or value != NEWER[name]}
    content["limits"] = [one for one in started_with["limits"] if one not in limits]
    return canonical_digest({**content, "service": [line for line in lines if line]})
