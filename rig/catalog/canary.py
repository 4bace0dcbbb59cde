"""Prompts of the quality canary: inventory/canary/NAME.yaml, which a family names."""

from functools import cache
from pathlib import Path

from rig.catalog.yaml_source import load
from rigctl.contract.canary import CanaryPrompts

GENERAL = "general"
"""What models are asked whose family names nothing else."""
SHIPPED = Path(__file__).resolve().parents[2] / "inventory"


def canary_prompts(name: str, inventory: Path) -> CanaryPrompts:
    """The prompts of this name; those shipped where the inventory has none. Raises CatalogError, ContractError."""
    own = inventory / "canary" / f"{name}.yaml"
    return _read(own if own.is_file() else SHIPPED / "canary" / f"{name}.yaml")


@cache
def _read(path: Path) -> CanaryPrompts:
    shown = f"inventory/canary/{path.name}"
    return CanaryPrompts.validated({"format": CanaryPrompts.FORMAT, **load(path, shown_as=shown).data}, shown)
