"""`kimi-rig explain`: the page of each host of an inventory, or of recorded facts; changes nothing."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from rig.artifacts.host_checks import findings
from rig.catalog.entries import check_all, load_catalog
from rig.cli.arguments import limit, verb
from rig.cli.converge import RunFailed, asked_hosts, run_pyinfra
from rig.facts.host import FactsError, HostFacts, parse_host
from rig.host.explanation import explain_json, explain_text
from rig.host.topology import Decision, decide
from rig.plan.drafter_layers import drafters_json, drafters_text
from rig.plan.host_plan import HostPlan, recorded_workloads
from rig.plan.model_defaults import defaults_json, defaults_text
from rig.plan.training_page import trainings_json, trainings_text

PAGES = "KIMI_RIG_PAGES"
"""Environment variable: file that tasks/explain.py appends a JSON line a host to."""


def live_pages(inventory: str, limits: Sequence[str]) -> list[dict[str, Any]]:
    """The pages of live hosts. Raises RunFailed when one of them could not be read."""
    hosts = asked_hosts(inventory, limits)
    with tempfile.NamedTemporaryFile("r", prefix="kimi-rig-pages-") as pages:
        result = run_pyinfra(
            inventory, limits, "tasks/explain.py", "--dry", set_={PAGES: pages.name}, capture_output=True
        )
        found = [json.loads(line) for line in pages]
    if missing := sorted(set(hosts) - {page["host"] for page in found}):
        raise RunFailed(f"no page for {', '.join(missing)}:\n{result.stderr.strip()}")
    return found


def live_page(name: str, plan: HostPlan) -> dict[str, Any]:
    """Both forms of a live host's page, with what the preflight found."""
    found = findings(plan)
    each = plan.decisions
    below = defaults_text(plan) + drafters_text(plan) + trainings_text(plan)
    if found:
        below += "\nPreflight\n---------\n" + "".join(f"{one}\n" for one in found)
    document = explain_json(name, plan.facts, plan.decision, each)
    document["defaults"], document["drafters"] = defaults_json(plan), drafters_json(plan)
    document["trainings"] = trainings_json(plan)
    document["findings"] = [
        {"severity": one.severity, "code": one.code, "message": one.message, "remedy": one.remedy} for one in found
    ]
    page = _texts(name, plan.facts, plan.decision, each)
    return {"host": name, **{key: text + below for key, text in page.items()}, "json": document}


def _texts(name: str, facts: HostFacts, decision: Decision, each: Mapping[str, Decision]) -> dict[str, str]:
    return {
        key: explain_text(name, facts, decision, each, everything=everything)
        for key, everything in (("text", False), ("all", True))
    }


def recorded_page(path: Path) -> dict[str, Any]:
    """The page of a document that remote_script.py once wrote. Raises RunFailed when it is none."""
    try:
        facts = parse_host(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, FactsError) as error:
        raise RunFailed(f"{path}: {error}") from None
    decision = decide(facts)
    each = {name: decide(facts, None, work) for name, work in recorded_workloads(load_catalog()).items()}
    document = explain_json(path.stem, facts, decision, each)
    return {"host": path.stem, **_texts(path.stem, facts, decision, each), "json": document}


@verb("explain")
@click.argument("inventory", required=False)
@limit
@click.option("--facts", type=Path, help="A recorded document of remote_script.py instead of live hosts.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--all", "everything", is_flag=True, help="Whole reasons, every report, and what is left alone.")
def explain_command(
    inventory: str | None, limits: Sequence[str], facts: Path | None, form: str, *, everything: bool
) -> None:
    """Print what is set on each host of INVENTORY (such as inventory/gpu.py), what not, and why. Changes nothing.

    Exit codes: 0 printed; 1 a host could not be read.
    """
    if (facts is None and inventory is None) or (facts and inventory):
        raise click.UsageError("name an inventory, or --facts with a recorded document")
    check_all()
    pages = [recorded_page(facts)] if facts else live_pages(str(inventory), limits)
    if form == "json":
        print(json.dumps([page["json"] for page in pages], indent=2))
    else:
        print("\n".join(page["all" if everything else "text"] for page in pages), end="")
