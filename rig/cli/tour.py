"""`kimi-rig tour`: what it does to a host with eight cards, from recorded facts. No host, no root, under a minute.

The plan is the deploy's own dry run; unit and explanation are what the deploy would write.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from rig.artifacts.units import unit_file
from rig.bench import ledger
from rig.bench.report import markdown
from rig.catalog.entries import ROOT
from rig.cli.arguments import verb
from rig.cli.bench import entry_line
from rig.cli.connect import talk_text
from rig.cli.converge import Plan, inventory_hosts, make_plan
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


@dataclass(frozen=True)
class Page:
    """A page of the tour. short: what `kimi-rig tour` shows of it, by default its lines from `start` on."""

    title: str
    whole: Callable[[HostPlan], str]
    start: str = ""
    short: Callable[[HostPlan], str] | None = None


LINES, COLUMNS = 20, 120
"""Of a page that is not shown whole."""


def _plan(_plan: HostPlan) -> Plan:
    return make_plan(INVENTORY, (), quiet=True)


PAGES = {
    "plan": Page(
        "make plan: what a deploy would do to a bare host with eight cards",
        lambda plan: _plan(plan).text(),
        short=lambda plan: "\n".join(f"{one.operation}: {'; '.join(one.details)}" for one in _plan(plan).changes),
    ),
    "unit": Page(
        f"one of its units: {UNITS}/{unit_name(CONFIGURATION)}",
        lambda plan: unit_file(plan, CONFIGURATION),
        "Type=notify",
        # What starts, with a flag a line.
        lambda plan: re.sub(r"(?m)^(#|Environment).*\n", "", unit_file(plan, CONFIGURATION)).replace(" --", "\n    --"),
    ),
    "explain": Page(
        "make explain: what the host's hardware decides, and why",
        lambda plan: (
            explain_text("turin", plan.facts, plan.decision, plan.decisions) + defaults_text(plan) + drafters_text(plan)
        ),
        "--- Kernel arguments",
    ),
    # Nothing was measured on these cards.
    "report": Page(
        "make bench: what it measures goes to a ledger and a report; here what others reported",
        lambda _plan: markdown(ledger.references(ledger.read(ledger.DIRECTORY))),
        short=lambda _plan: "\n".join(map(entry_line, ledger.read(ledger.DIRECTORY))),
    ),
    "talk": Page("the last lines of a deploy: how to talk to it", page_talk),
}


def excerpt(name: str, page: Page, plan: HostPlan) -> str:
    """The page in a third of a screen, with how to see the rest."""
    lines = (page.short or page.whole)(plan).strip().split("\n")
    if page.short is None and len(lines) <= LINES:
        return "\n".join(lines)
    begin = lines.index(page.start) if page.start else 0
    shown = [line if len(line) <= COLUMNS else f"{line[: COLUMNS - 3]}..." for line in lines[begin : begin + LINES]]
    return "\n".join([*shown, f"... all of it: make tour PAGE={name}"])


@verb("tour")
@click.argument("pages", nargs=-1, type=click.Choice([*PAGES]), metavar="[PAGE]...")
def tour_command(pages: Sequence[str]) -> None:
    """Show what kimi-rig does to a host with eight cards, from recorded facts. No host, no root, under a minute.

    PAGE: plan, unit, explain, report or talk. Without one: the beginning of each.
    """
    [host] = inventory_hosts(INVENTORY)
    plan = recorded_plan(host["data"])
    for name in pages or PAGES:
        page = PAGES[name]
        print(f"== {page.title}\n\n{page.whole(plan) if pages else excerpt(name, page, plan)}\n", flush=True)
