"""`kimi-rig tour`: what it does to a host with eight cards, from recorded facts. No host, no root, under a minute.

The plan is the deploy's own dry run; unit and explanation are what the deploy would write.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from rig.artifacts.units import unit_file
from rig.bench import ledger
from rig.bench.report import markdown
from rig.catalog.entries import ROOT
from rig.cli.arguments import verb
from rig.cli.connect import talk_text
from rig.cli.converge import inventory_hosts, make_plan
from rig.facts.host import parse_host
from rig.host.explanation import explain_text
from rig.plan.drafter_layers import drafters_text
from rig.plan.host_plan import HostPlan, plan_from_facts
from rig.plan.model_defaults import defaults_text
from rigctl.contract.layout import UNITS, unit_name

INVENTORY = "inventory/tour.py"
FACTS = ROOT / "rig" / "facts" / "turin-direct.json"
CONFIGURATION = "sglang-eagle3-custom"


def recorded_plan(data: Mapping[str, Any]) -> HostPlan:
    """The plan of the recorded host. Raises CatalogError."""
    return plan_from_facts(data, parse_host(FACTS.read_text(encoding="utf-8")))


def page_talk(_plan: HostPlan) -> str:
    """What a deploy says at its end, for a host by this name."""
    [host] = inventory_hosts(INVENTORY)
    return talk_text([{"name": "turin.example.com", "data": host["data"]}], ["turin.example.com"])


PAGES: dict[str, tuple[str, Callable[[HostPlan], str]]] = {
    "plan": (
        "make plan: what a deploy would do to a bare host with eight cards",
        lambda _plan: make_plan(INVENTORY, ()).text(),
    ),
    "unit": (f"one of its units: {UNITS}/{unit_name(CONFIGURATION)}", lambda plan: unit_file(plan, CONFIGURATION)),
    "explain": (
        "make explain: what the host's hardware decides, and why",
        lambda plan: (
            explain_text("turin", plan.facts, plan.decision, plan.decisions) + defaults_text(plan) + drafters_text(plan)
        ),
    ),
    # Nothing was measured on these cards.
    "report": (
        "make bench: its report, here with the figures that others reported",
        lambda _plan: markdown(ledger.references(ledger.read(ledger.DIRECTORY))),
    ),
    "talk": ("the last lines of a deploy: how to talk to it", page_talk),
}


@verb("tour")
@click.argument("pages", nargs=-1, type=click.Choice([*PAGES]), metavar="[PAGE]...")
def tour_command(pages: Sequence[str]) -> None:
    """Show what kimi-rig does to a host with eight cards, from recorded facts. No host, no root, under a minute.

    PAGE: plan, unit, explain, report or talk; default all.
    """
    [host] = inventory_hosts(INVENTORY)
    plan = recorded_plan(host["data"])
    for name in pages or PAGES:
        title, page = PAGES[name]
        print(f"== {title}\n\n{page(plan)}\n", flush=True)
