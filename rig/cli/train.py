"""`kimi-rig train`: a drafter of one's own, from prompts to its entries in the catalogues, on the host that serves."""

import json
from collections.abc import Sequence
from pathlib import Path

import click

from rig.artifacts.published import receipt_path, served_name
from rig.bench import training_report
from rig.catalog.entries import ROOT, inventory_directory, load_catalog
from rig.cli.arguments import inventory as on_inventory
from rig.cli.arguments import limit, verb
from rig.cli.converge import RunFailed, asked_hosts, deploy, follow_pyinfra, inventory_hosts
from rig.cli.progress import Progress, verbose
from rigctl.contract.evaluation import Evaluation

TASK = "tasks/train.py"


@verb("train", interrupted="the training goes on on its host, the same command follows it")
@on_inventory
@limit
@click.option("--name", required=True, help="Of inventory/training.yaml.")
@click.option("--out", type=Path, default=ROOT / ".bench", metavar="DIRECTORY", help="Of the report; default: .bench/.")
@verbose
def train_command(inventory: str, limits: Sequence[str], name: str, out: Path, *, verbose: bool) -> None:
    """Train the drafter NAME on a host of INVENTORY, publish it, and write its entries into the catalogues.

    What the host lacks is deployed first. A training that was cut goes on where it ended.

    Exit codes: 0 published, 1 failed.
    """
    hosts = asked_hosts(inventory, limits)
    if len(hosts) != 1:
        raise RunFailed(f"a drafter is trained on one host, not on {', '.join(hosts)}: name it by --limit")
    [data] = [one["data"] for one in inventory_hosts(inventory) if one["name"] == hosts[0]]
    if name not in data.get("trainings", ()):
        there = ", ".join(data.get("trainings", ())) or "none"
        raise RunFailed(f"{name} is none of the trainings in {hosts[0]}'s data (`trainings`: {there})")
    progress = Progress(f"train-{Path(inventory).stem}", verbose=verbose)
    deploy(progress, inventory, limits)
    entry = load_catalog(data.get("catalogue_overlay")).training[name]
    if follow_pyinfra(progress, inventory, limits, TASK, "--data", f"train={name}"):
        raise RunFailed(f"{name}: {progress.trouble()}\nThe same command goes on where it ended")
    progress.end()
    receipt = receipt_path(inventory_directory(), entry.publish)
    if not receipt.exists():
        raise RunFailed(f"{name} was trained, and no receipt came of it: the same command asks again")
    counted = Evaluation.parse(json.loads(receipt.read_text()).get("evaluation"), str(receipt))
    print(*training_report.write(counted, out), sep="\n")
    served = ", ".join(served_name(base, entry) for base in entry.evaluation.configurations)
    print(f"{entry.publish} is published: see `kimi-rig diff`; a deploy makes units of {served}")
