"""`kimi-rig references`: the JSON schema of every order that crosses to a host, from the contract (docs/schemas/)."""

import importlib
import json
import pkgutil

import click

from rig.catalog.entries import ROOT
from rig.cli.arguments import verb
from rigctl import contract
from rigctl.contract.order import Order

SCHEMAS = ROOT / "docs" / "schemas"


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
    """Write the JSON schemas of all orders to docs/schemas/."""
    wanted = schemas()
    there = {path.name: path.read_text() for path in SCHEMAS.glob("*.json")}
    if check:
        stale = sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))
        print("".join(f"docs/schemas/{name} is not as the contract says: `make schemas` writes it\n" for name in stale))
        return 1 if stale else 0
    SCHEMAS.mkdir(exist_ok=True)
    for name in there.keys() - wanted.keys():
        (SCHEMAS / name).unlink()
    for name, text in wanted.items():
        (SCHEMAS / name).write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(references_command(standalone_mode=False))
