"""What our configurations would interrupt on a host that serves already, and what changes for its clients. Pure."""

from collections.abc import Iterable

from rig.catalog.entries import Configuration
from rig.facts.servers import Server
from rig.plan.command_lines import served_model_name
from rig.plan.host_plan import HostPlan
from rigctl.contract import layout


def interruptions(plan: HostPlan, servers: Iterable[Server]) -> list[str]:
    """One line a finding, for the operator. A deploy itself touches none of these processes."""
    servers = list(servers)
    lines: list[str] = []
    for server in servers:
        if server.ours:
            continue
        mine = [name for name, entry in plan.serving.items() if _wants(plan, name, entry, server)]
        if not mine:
            continue
        what = f"listens on {server.address}" if server.address else "holds a GPU"
        lines.append(
            f"{who(server)} {what} and is not ours: a deploy leaves it alone, and {_units(mine)} cannot start "
            "until you end it"
        )
        if server.address:
            lines.append(clients(plan, mine[0], server))
    if lines and (boot := plan.data.at_boot):
        starts = "is to start at boot: after the next boot it is" if len(boot) == 1 else "start at boot: they are then"
        lines.append(f"{' and '.join(map(layout.unit_name, boot))} {starts} what serves")
    return list(dict.fromkeys(lines))


def clients(plan: HostPlan, name: str, server: Server) -> str:
    """What clients of `server` must change when configuration `name` takes its place."""
    entry = plan.serving[name]
    places = [one.place for one in plan.edge.listeners if name in one.engines] if plan.edge else []
    address = places[0] if places else f"{entry.listen.host}:{entry.listen.port} (this host only)"
    guarded = plan.edge.keys if places and plan.edge else plan.data.api_key_file
    key = "an API key is needed" if guarded else "no API key is asked for"
    model = served_model_name(entry, plan.locations(entry))
    served = ", ".join(server.models) or "not known"
    return (
        f"for clients of {server.address}, {layout.unit_name(name)} means: "
        f"address {address}; {key}; model {model} (now: {served})"
    )


def who(server: Server) -> str:
    """The process in words."""
    if not server.pid:
        return "a process not visible here"
    unit = f", unit {server.unit}" if server.unit else ""
    return f"process {server.pid} ({server.command or 'no command line'}; user {server.user}{unit})"


def _wants(plan: HostPlan, name: str, entry: Configuration, server: Server) -> bool:
    edge = [one.port for one in plan.edge.listeners if name in one.engines] if plan.edge else []
    return server.port in (entry.listen.port, *edge) if server.address else bool(entry.gpus)


def _units(names: list[str]) -> str:
    units = [layout.unit_name(name) for name in names]
    return ", ".join(units[:2]) + (f" and {len(units) - 2} more" if len(units) > 2 else "")
