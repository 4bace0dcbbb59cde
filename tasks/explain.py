"""Explain: for `make explain`. Reads the host and writes its page where the wrapper asked for it; no operations."""

import json
import os
from pathlib import Path

from pyinfra import host

from rig.artifacts.host_checks import findings
from rig.cli.explain import PAGES
from rig.host.explanation import explain_json, explain_text
from rig.plan.current import current_plan
from rig.plan.drafter_layers import drafters_json, drafters_text
from rig.plan.host_plan import HostPlan


def page(plan: HostPlan) -> dict[str, object]:
    """Both forms of a host's page, with what the preflight found."""
    found = findings(plan)
    text = explain_text(host.name, plan.facts, plan.decision) + drafters_text(plan)
    if found:
        text += "\nPreflight\n---------\n" + "".join(f"{one}\n" for one in found)
    document = explain_json(host.name, plan.facts, plan.decision)
    document["drafters"] = drafters_json(plan)
    document["findings"] = [
        {"severity": one.severity, "code": one.code, "message": one.message, "remedy": one.remedy} for one in found
    ]
    return {"host": host.name, "text": text, "json": document}


if __name__ == "builtins":
    with Path(os.environ[PAGES]).open("a", encoding="utf-8") as pages:
        pages.write(json.dumps(page(current_plan())) + "\n")
