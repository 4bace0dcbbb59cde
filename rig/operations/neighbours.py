"""Tell what serves on a host already."""

from pyinfra import host
from pyinfra.api import operation

from rig.facts.servers import Servers
from rig.operations.common import Commands, notice
from rig.plan.host_plan import HostPlan
from rig.plan.neighbours import interruptions


@operation()
def neighbours_told(plan: HostPlan) -> Commands:
    """Servers on our ports or GPUs that are not ours are named, with what taking their place means. Changes nothing."""
    ports = sorted({entry.listen.port for entry in plan.serving.values()})
    servers = host.get_fact(Servers, ports=ports)
    lines = interruptions(plan, servers)
    for line in lines:
        notice(line)
    host.noop(f"{len(lines)} things to know" if lines else "nobody else serves here")
    return
    yield
