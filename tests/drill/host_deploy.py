"""The host stage on a box that is told it has eight cards on two EPYC CPUs: everything else it reads of the box itself.

KIMI_RIG_DRILL_DRIVER: version of the driver that counts as loaded, KIMI_RIG_DRILL_PROPRIETARY: its modules are not the
open ones. KIMI_RIG_DRILL_IN_USE: a process holds a card.
"""

import os
from dataclasses import replace

from pyinfra import host

from rig.catalog.entries import ROOT
from rig.facts.host import GpuProcess, HostFacts, parse_host
from rig.plan.current import current_plan
from rig.plan.host_plan import HostData, HostPlan, plan_from_facts
from tasks.base import base
from tasks.host import host as host_stage
from tests.unit.host_archetypes import bare

RECORDED = parse_host((ROOT / "rig/facts/turin-direct.json").read_text())


def told(box: HostFacts) -> HostFacts:
    """The box's facts with the cards, bridges and CPU of the recorded host."""
    loaded = os.environ.get("KIMI_RIG_DRILL_DRIVER")
    cards = RECORDED if loaded else bare(RECORDED)
    driver = replace(
        RECORDED.driver if loaded else box.driver,
        version=loaded,
        on_disk=box.driver.on_disk or loaded,
        open_module="KIMI_RIG_DRILL_PROPRIETARY" not in os.environ,
    )
    held = (GpuProcess("GPU-0", 4711, 9000, "python3"),) if os.environ.get("KIMI_RIG_DRILL_IN_USE") else cards.processes
    return replace(
        box, gpus=cards.gpus, bridges=cards.bridges, relations=cards.relations, p2p=cards.p2p, processes=held,
        driver=driver, cpu=cards.cpu, numa_nodes=2, iommu_groups=90, iommu_types=("DMA-FQ",), virtualisation="none",
        container="none", device_nodes=cards.device_nodes, nvidia_uvm_node=cards.nvidia_uvm_node,
    )  # fmt: skip


def plan() -> HostPlan:
    """The plan of the box as the host it plays."""
    data = {key: host.data.get(key) for key in HostData.model_fields if hasattr(host.data, key)}
    return plan_from_facts(data, told(current_plan().facts))


if __name__ == "builtins":
    whole = plan()
    base(plan=whole)
    host_stage(plan=whole)
