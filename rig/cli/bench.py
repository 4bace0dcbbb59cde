"""`python -m rig.cli.bench`: run a sweep, list and compare the ledger, write the report."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rig.bench import ledger, report
from rig.bench.analysis import newest, point, unfair
from rig.bench.fairness import is_noise
from rig.bench.plots import PlottingMissing
from rig.bench.views import diagnose_point
from rig.catalog.entries import ROOT
from rig.cli.arguments import HOSTS, Options, Verbs, parse
from rig.cli.converge import FAILED, asked_hosts, ended, run_pyinfra


def run_command(arguments: argparse.Namespace) -> int:
    """Run benchmark.py over the inventory, then write the report. 1 when a cell failed or a host gave no result."""
    before = {entry.id for entry in ledger.results(ledger.read(arguments.ledger))}
    hosts = asked_hosts(arguments.inventory, arguments.limit)
    data = {"bench_sweep": arguments.sweep, "bench_configurations": arguments.configs}
    options = [word for key, value in data.items() if value for word in ("--data", f"{key}={value}")]
    ledger_place = {"KIMI_RIG_LEDGER": str(arguments.ledger.resolve())}
    status = run_pyinfra(
        arguments.inventory, arguments.limit, "benchmark.py", *options, "-y", set_=ledger_place
    ).returncode
    entries = ledger.read(arguments.ledger)
    new = [entry for entry in ledger.results(entries) if entry.id not in before]
    print(*report.write(entries, arguments.out), sep="\n")
    return _judge(status, hosts, new)


def _judge(status: int, hosts: Sequence[str], new: Sequence[ledger.Result]) -> int:
    failed = [entry for entry in new if entry.status == "failed"]
    for entry in failed:
        print(f"failed: {entry.host}, {entry.id}: {entry.cause}", file=sys.stderr)
    silent = [host for host in hosts if host not in {entry.host for entry in new}]
    if silent:
        print(f"failed: no result of {', '.join(silent)}; the next run goes on where it ended", file=sys.stderr)
    print(f"{len(new) - len(failed)} cells measured, {len(failed)} failed")
    return FAILED if status or failed or silent else 0


def report_command(arguments: argparse.Namespace) -> int:
    """Write report.html and report.md."""
    entries = ledger.read(arguments.ledger)
    print(*report.write(ledger.references(entries) if arguments.reference_only else entries, arguments.out), sep="\n")
    return 0


def list_command(arguments: argparse.Namespace) -> int:
    """One line an entry."""
    for entry in ledger.read(arguments.ledger):
        if isinstance(entry, ledger.Reference):
            figures = ", ".join(f"{figure.what} {figure.shown or 'unknown'}" for figure in entry.figures)
            print(f"{entry.id:<60} reported  {figures}")
            continue
        found = point(entry)
        said = f"{found.total.median:,.1f} tok/s" if found else f"failed: {entry.cause}"
        length = f", acceptance length {found.length:.2f}" if found and found.length else ""
        print(f"{entry.id:<60} measured  {said}{length}")
    return 0


def compare_command(arguments: argparse.Namespace) -> int:
    """Two configurations, load by load; says what makes them incomparable."""
    pairs = [
        (f"{host}  {scene.title}, {concurrency} concurrent", one, other)
        for host, study in newest(ledger.results(ledger.read(arguments.ledger))).items()
        for scene in study.scenes
        for concurrency, one in study.line(scene, arguments.one)
        if (other := study.points.get((scene, concurrency, arguments.other)))
    ]
    if not pairs:
        raise ledger.LedgerError(
            f"{arguments.one} and {arguments.other} were not measured under one load (`python -m rig.cli.bench list`)"
        )
    for load, one, other in pairs:
        speeds = f"{one.total.median:,.1f} against {other.total.median:,.1f} tok/s"
        noise = "  noise: the ranges overlap" if is_noise(one.total, other.total) else ""
        print(f"{load}: {speeds}, {other.total.median / one.total.median:.2f} times{noise}")
        for finding in unfair([one, other]):
            print(f"  UNFAIR {finding.check}: {finding.message}")
    return 0


def diagnose_command(arguments: argparse.Namespace) -> int:
    """Why a drafter does badly, load by load."""
    drafting = [
        (study, scene, concurrency, one)
        for study in newest(ledger.results(ledger.read(arguments.ledger))).values()
        for (scene, concurrency, name), one in study.points.items()
        if name == arguments.configuration and one.length is not None
    ]
    if not drafting:
        raise ledger.LedgerError(f"no result of {arguments.configuration} counted drafts")
    for study, scene, concurrency, one in drafting:
        print(f"{study.host}  {scene.title}, {concurrency} concurrent: acceptance length {one.length:.2f}")
        found = [
            f"{h.weight:<10} {h.cause}: {h.why}. Decides: {h.experiment}" for h in diagnose_point(study, scene, one)
        ]
        for line in found or ["not low"]:
            print(f"  {line}")
    return 0


LEDGER: Options = {"--ledger": {"type": Path, "default": ledger.DIRECTORY, "help": "default: ledger/"}}
OUT: Options = {"--out": {"type": Path, "default": ROOT / ".bench", "help": "directory of the report, default .bench/"}}
VERBS: Verbs = {
    "run": (
        run_command,
        "measure configurations, then write the report",
        {
            **HOSTS,
            "--configs": {"default": "", "help": "names between spaces; default: all of the host"},
            "--sweep": {"default": "", "help": "of inventory/benchmark.yaml; default: the host's"},
            **OUT,
            **LEDGER,
        },
    ),
    "report": (
        report_command,
        "write report.html and report.md",
        {**OUT, "--reference-only": {"action": "store_true", "help": "the reported figures alone"}, **LEDGER},
    ),
    "list": (list_command, "one line a result", LEDGER),
    "compare": (compare_command, "two configurations, load by load", {"one": {}, "other": {}, **LEDGER}),
    "diagnose": (diagnose_command, "why a drafter does badly", {"configuration": {}, **LEDGER}),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Every failure is one message and exit code 1, an interrupt too."""
    arguments = parse("rig.cli.bench", __doc__, argv, verbs=VERBS)
    when_interrupted = "a sweep goes on on its host, the next run follows it"
    return ended(lambda: int(arguments.run(arguments)), when_interrupted, (ledger.LedgerError, PlottingMissing))


if __name__ == "__main__":
    raise SystemExit(main())
