"""What the targets of a host are asked by the quality canary (contract/canary.py). Pure but for reads."""

from rig.catalog.canary import GENERAL, canary_prompts
from rig.catalog.entries import inventory_directory, load_catalog
from rig.plan.host_plan import HostPlan
from rigctl.contract import layout


def canary_files(plan: HostPlan) -> dict[str, bytes]:
    """Absolute path -> prompts of each target that the host serves. Raises CatalogError, ContractError."""
    families = load_catalog(plan.data.catalogue_overlay).families
    found = {}
    for target in dict.fromkeys(entry.target for entry in plan.serving.values()):
        family = families.get(plan.checkpoints[target].family or "")
        prompts = canary_prompts(family.canary if family else GENERAL, inventory_directory())
        found[f"{layout.CANARY_PROMPTS}/{target}.json"] = prompts.text().encode()
    return found
