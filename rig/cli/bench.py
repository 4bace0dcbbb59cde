"""`kimi-rig bench`: run a sweep, list and compare the ledger, write the report."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from rig.bench import ledger, report
from rig.bench.analysis import newest, point, unfair
from rig.bench.fairness import is_noise
from rig.bench.views import diagnose_point
from rig.catalog.entries import ROOT
from rig.cli.arguments import FAILED, Verb, inventory, limit
from rig.cli.converge import asked_hosts, follow_pyinfra
from rig.cli.progress import Progress, verbose


@click.group("bench")
def bench_command() -> None:
    """Measure serving configurations; list, compare and diagnose what was measured; write the report."""


_place = click.option(
    "--ledger", "place", type=Path, default=ledger.DIRECTORY, metavar="DIRECTORY", help="Default: ledger/."
)
_out = click.option(
    "--out", type=Path, default=ROOT / ".bench", metavar="DIRECTORY", help="Of the report; default: .bench/."
)


def _verb(name: str) -> Callable[[Callable[..., Any]], click.Command]:
    return bench_command.command(name, cls=Verb, interrupted="a sweep goes on on its host, the next run follows it")


@_verb("run")
@inventory
@limit
@click.option("--configs", default="", help="Names between spaces; default: all of the host.")
@click.option("--sweep", default="", help="Of inventory/benchmark.yaml; default: the host's.")
@_out
@_place
@verbose
def run(
    inventory: str, limits: Sequence[str], configs: str, sweep: str, out: Path, place: Path, *, verbose: bool
) -> int:
    """Measure configurations on the hosts of INVENTORY, then write the report.

    Exit codes: 0 measured; 1 a cell failed or a host gave no result.
    """
    before = {entry.id for entry in ledger.results(ledger.read(place))}
    hosts = asked_hosts(inventory, limits)
    data = {"bench_sweep": sweep, "bench_configurations": configs}
    options = [word for key, value in data.items() if value for word in ("--data", f"{key}={value}")]
    ledger_place = {"KIMI_RIG_LEDGER": str(place.resolve())}
    progress = Progress(f"bench-{Path(inventory).stem}", verbose=verbose)
    status = follow_pyinfra(progress, inventory, limits, "benchmark.py", *options, set_=ledger_place)
    if status:
        print(progress.trouble(), file=sys.stderr)
    progress.end()
    entries = ledger.read(place)
    new = [entry for entry in ledger.results(entries) if entry.id not in before]
    print(*report.write(entries, out), sep="\n")
    return _exit_code(status, hosts, new)


def _exit_code(status: int, hosts: Sequence[str], new: Sequence[ledger.Result]) -> int:
    failed = [entry for entry in new if entry.status == "failed"]
    for entry in failed:
        print(f"failed: {entry.host}, {entry.id}: {entry.cause}", file=sys.stderr)
    silent = [host for host in hosts if host not in {entry.host for entry in new}]
    if silent:
        print(f"failed: no result of {', '.join(silent)}; the next run goes on where it ended", file=sys.stderr)
    print(f"{len(new) - len(failed)} cells measured, {len(failed)} failed")
    return FAILED if status or failed or silent else 0


@_verb("report")
@_out
@click.option("--reference-only", is_flag=True, help="The reported figures alone.")
@_place
def report_(out: Path, place: Path, *, reference_only: bool) -> None:
    """Write report.html and report.md from the ledger."""
    entries = ledger.read(place)
    print(*report.write(ledger.references(entries) if reference_only else entries, out), sep="\n")


@_verb("list")
@_place
def list_(place: Path) -> None:
    """Print one line for each entry of the ledger."""
    for entry in ledger.read(place):
        print(entry_line(entry))


def entry_line(entry: ledger.Entry) -> str:
    """An entry of the ledger in one line."""
    if isinstance(entry, ledger.Reference):
        figures = ", ".join(f"{figure.what} {figure.shown or 'unknown'}" for figure in entry.figures)
        return f"{entry.id:<60} reported  {figures}"
    found = point(entry)
    said = f"{found.total.median:,.1f} tok/s" if found else f"failed: {entry.cause}"
    length = f", acceptance length {found.length:.2f}" if found and found.length else ""
    return f"{entry.id:<60} measured  {said}{length}"


@_verb("compare")
@click.argument("one")
@click.argument("other")
@_place
def compare(one: str, other: str, place: Path) -> None:
    """Compare two configurations, load by load; says what makes them incomparable."""
    pairs = [
        (f"{host}  {scene.title}, {concurrency} concurrent", first, second)
        for host, study in newest(ledger.results(ledger.read(place))).items()
        for scene in study.scenes
        for concurrency, first in study.line(scene, one)
        if (second := study.points.get((scene, concurrency, other)))
    ]
    if not pairs:
        raise ledger.LedgerError(f"{one} and {other} were not measured under one load (`kimi-rig bench list`)")
    for load, first, second in pairs:
        speeds = f"{first.total.median:,.1f} against {second.total.median:,.1f} tok/s"
        noise = "  noise: the ranges overlap" if is_noise(first.total, second.total) else ""
        print(f"{load}: {speeds}, {second.total.median / first.total.median:.2f} times{noise}")
        for finding in unfair([first, second]):
            print(f"  UNFAIR {finding.check}: {finding.message}")


@_verb("diagnose")
@click.argument("configuration")
@_place
def diagnose(configuration: str, place: Path) -> None:
    """Say why a drafter does badly, load by load."""
    drafting = [
        (study, scene, concurrency, one)
        for study in newest(ledger.results(ledger.read(place))).values()
        for (scene, concurrency, name), one in study.points.items()
        if name == configuration and one.length is not None
    ]
    if not drafting:
        raise ledger.LedgerError(f"no result of {configuration} counted drafts")
    for study, scene, concurrency, one in drafting:
        print(f"{study.host}  {scene.title}, {concurrency} concurrent: acceptance length {one.length:.2f}")
        found = [
            f"{h.weight:<10} {h.cause}: {h.why}. Decides: {h.experiment}" for h in diagnose_point(study, scene, one)
        ]
        for line in found or ["not low"]:
            print(f"  {line}")
