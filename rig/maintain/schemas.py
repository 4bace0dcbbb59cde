"""`kimi-rig references`: what docs/ shows of the code: schemas of all orders, keys of the catalogues, commands."""

import importlib
import json
import pkgutil

import click

from rig.catalog.entries import ROOT
from rig.cli.arguments import FAILED, verb
from rig.maintain.references import pages
from rigctl import contract
from rigctl.contract.order import Order

DOCS = ROOT / "docs"


def schemas() -> dict[str, str]:
    """File name -> schema, for each order of the contract."""
    for module in pkgutil.iter_modules(contract.__path__):
        importlib.import_module(f"{contract.__name__}.{module.name}")
    found = {}
    for order in Order.__subclasses__():
        schema = order.model_json_schema() | {"x-format": order.FORMAT}
        found[f"{order.__name__}.json"] = json.dumps(schema, indent=1, sort_keys=True) + "\n"
    return found


@verb("references")
@click.option("--check", is_flag=True, help="Write nothing; exit code 1 where a file differs.")
def references_command(*, check: bool) -> int:
    """Write what docs/ shows of the code: schemas of all orders, keys of the catalogues, commands."""
    wanted = {DOCS / "schemas" / name: text for name, text in schemas().items()}
    wanted |= {DOCS / "reference" / name: text for name, text in pages().items()}
    there = {path: path.read_text() for path in {*(DOCS / "schemas").glob("*.json"), *wanted} if path.exists()}
    stale = sorted(path for path in {*wanted, *there} if wanted.get(path) != there.get(path))
    for path in stale:
        if check:
            print(f"{path.relative_to(ROOT)} is not as the code says: `make schemas` writes it")
        elif path in wanted:
            path.write_text(wanted[path])
        else:
            path.unlink()
    return FAILED if check and stale else 0


if __name__ == "__main__":
    raise SystemExit(references_command(standalone_mode=False))
