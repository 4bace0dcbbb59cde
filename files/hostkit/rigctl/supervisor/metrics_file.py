"""What the supervisor knows of its engine, as a Prometheus text file that goes when the engine goes.

The engine's own /metrics has its load and latency; here is what only the supervisor knows. A node exporter reads it:
`--collector.textfile.directory=/run/kimi-rig/*/metrics`. The pattern must match directories alone: the exporter counts
a file that it matches as an error.
"""

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from rigctl.guarded import Place
from rigctl.supervisor.specification import Specification
from rigctl.supervisor.watchdog import Watch


def publish(specification: Specification, watch: Watch) -> None:
    """Write the file, to be read by anyone, and for this version also where the one before had it."""
    text = exposition(specification, watch).encode()
    specification.runtime.make("metrics", 0o755)  # the unit's umask keeps others out
    Place(f"{specification.runtime}/metrics").write(f"{specification.name}.prom", text)
    specification.runtime.write("metrics.prom", text)


def exposition(specification: Specification, watch: Watch) -> str:
    """Gauges of one configuration. What is not known, such as the length before enough steps, is left out."""
    registry = CollectorRegistry()
    floor = specification.acceptance_floor if specification.speculation else None
    values = {
        "answer_seconds": ("Time of the supervisor's last small completion", watch.answered_seconds),
        "wrong_answers": ("Wrong answers in a row; the unit's limit ends the engine", len(watch.errors)),
        "acceptance_length": ("Tokens a step: 1 + accepted drafts a step", watch.acceptance_length),
        "acceptance_length_floor": ("Below it the drafter is slower than none", floor),
        "acceptance_below_floor": ("1: the drafter is slower than none", float(watch.below_floor)),
    }
    for name, (text, value) in values.items():
        if value is not None:
            Gauge(f"kimi_{name}", text, ["configuration"], registry=registry).labels(specification.name).set(value)
    return generate_latest(registry).decode()
