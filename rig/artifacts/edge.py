"""The edge's files: HAProxy's configuration, the choice of the engine, the unit, the list of keys. Pure."""

import json
import re
import shlex
from collections.abc import Mapping
from string import ascii_letters, digits

from rig.artifacts.templates import JINJA
from rig.plan.command_lines import served_model_name
from rig.plan.edge import Acme, Edge, Tls
from rig.plan.host_plan import HostPlan
from rigctl.contract import layout

HAPROXY = "/usr/sbin/haproxy"
CONFIGURATION = f"{layout.EDGE}/haproxy.cfg"
UNIT = f"{layout.UNITS}/{layout.EDGE_UNIT}"
KEYS = f"{layout.EDGE}/keys.map"
ENGINE = f"{layout.EDGE}/engine.map"
CERTIFICATE = f"{layout.EDGE}/tls.pem"
OPEN = "EVERYONE"
"""Stands for all clients of an edge that asks for no key."""
SCRAPER = "SCRAPER"
"""Stands for the networks that may read counters, as a client; keys have names in lower case."""
RENEWAL, RENEWAL_TIMER = "kimi-edge-certificate.service", "kimi-edge-certificate.timer"
LEGO = "/usr/bin/lego"
ACME = "/var/lib/kimi-edge"
"""What the ACME client keeps: its account and the certificate. The edge's user owns it."""
ACME_ROOTS = f"{layout.EDGE}/acme-roots.pem"
RETRY_SECONDS = 15
_PLAIN = f"{ascii_letters}{digits}/._-"


def edge_files(plan: HostPlan) -> dict[str, str]:
    """Absolute path -> text of what the edge is and that anyone may read; nothing for a host without one."""
    edge = plan.edge
    if edge is None:
        return {}
    models = {name: served_model_name(entry, plan.locations(entry)) for name, entry in plan.serving.items()}
    # Engines that may serve different models at the same time.
    by_model = any(len({models[name] for name in one.engines}) > 1 for one in edge.listeners)
    values = {
        "mark": layout.UNIT_MARK,
        "directory": layout.EDGE,
    }
    tls = edge.tls
    files = {
        CONFIGURATION: JINJA.get_template("haproxy.cfg.j2").render(
            **values,
            listeners=edge.listeners,
            limits=edge.limits,
            models=by_model,
            certificate=tls and certificate_path(tls),
            keys=bool(edge.keys),
            clients=[*(sorted(edge.keys) or [OPEN]), *([SCRAPER] if edge.metrics_networks else [])],
            routes=routes(plan, edge),
            metrics_networks=edge.metrics_networks,
            everyone=OPEN,
            scraper=SCRAPER,
            retry_seconds=RETRY_SECONDS,
            error=_error,
        ),
        f"{layout.EDGE}/engines.lua": JINJA.get_template("engines.lua.j2").render(
            **values,
            user=plan.data.service_user,
            runtime=layout.RUNTIME,
            groups=[group for one in edge.listeners for group in one.groups],
            models={name: _lua_text(model) for name, model in models.items()},
            by_model=by_model,
        ),
        UNIT: JINJA.get_template("kimi-edge.service.j2").render(**values, haproxy=HAPROXY, user=layout.EDGE_USER),
    }
    if tls is not None and (tls.authority or tls.acme):
        certificate_values = {
            "names": tls.authority,
            "acme": acme_command(tls.acme) if tls.acme else None,
            "rigctl": layout.RIGCTL,
            "credentials": layout.CREDENTIALS,
            "edge": layout.EDGE_UNIT,
            "user": layout.EDGE_USER,
        }
        for unit in (RENEWAL, RENEWAL_TIMER):
            template = JINJA.get_template(f"{unit}.j2")
            files[f"{layout.UNITS}/{unit}"] = template.render(**values, **certificate_values)
    return files


def certificate_path(tls: Tls) -> str:
    """The file on the host with certificate and key."""
    return f"{ACME}/certificates/{tls.acme.names[0]}.pem" if tls.acme else CERTIFICATE


def certification(files: Mapping[str, str]) -> tuple[list[str], str] | None:
    """What says on the host why a new certificate is needed, in a line, and where the certificate lies.

    files: path -> text, as `edge_files` makes them or a deploy has recorded them. None where nothing issues one.
    """
    unit = files.get(f"{layout.UNITS}/{RENEWAL}")
    if unit is None:
        return None
    issued = re.search(rf"^ExecStart={layout.RIGCTL} edge-certificate (.+)$", unit, re.M)
    check = [layout.RIGCTL, "edge-certificate", "--check", *shlex.split(issued[1])] if issued else ["true"]
    return check, re.findall(r" ssl crt (\S+)", files[CONFIGURATION])[0]


def acme_command(acme: Acme) -> list[str]:
    """The file that is there once a certificate is, then the command line of lego without what it is to do."""
    domains = (f"--domains={name}" for name in acme.names)
    command = [LEGO, "--accept-tos", f"--email={acme.email}", f"--server={acme.directory}", f"--path={ACME}", "--pem"]
    roots = ["/usr/bin/env", f"LEGO_CA_CERTIFICATES={ACME_ROOTS}"] if acme.roots else []
    return [certificate_path(Tls(acme=acme)), *roots, *command, *domains, "--http", "--http.port=:80"]


def routes(plan: HostPlan, edge: Edge) -> dict[str, list[str]]:
    """Method -> paths that any release behind the edge offers."""
    engines = (entry for one in edge.listeners for entry in one.engines.values())
    allowed = {tuple(route.split(" ")) for entry in engines for route in plan.environments[entry.release].release.api}
    return {
        method: sorted(path for its, path in allowed if its == method) for method in sorted({m for m, _ in allowed})
    }


def keys_map(digests: Mapping[str, str]) -> str:
    """Content of the file of keys. digests: name -> sha256 of the key in hex digits; HAProxy has them in capitals."""
    return "".join(f"{digest.upper()} {name}\n" for name, digest in sorted(digests.items()))


def places(configuration: str) -> list[tuple[str, int]]:
    """Where a configuration of HAProxy that we wrote listens: addresses with ports."""
    found = re.findall(r"^    bind \[?([0-9A-Fa-f.:]+?)\]?:(\d+)(?: |$)", configuration, re.M)
    return [(address, int(port)) for address, port in found]


def _error(message: str, code: str) -> str:
    """An error as OpenAI's clients read it, for a text in single quotes."""
    return json.dumps({"error": {"message": message, "type": "edge", "code": code}})


def _lua_text(text: str) -> str:
    """The inside of a Lua string that is exactly `text`."""
    return "".join(chr(byte) if chr(byte) in _PLAIN else f"\\{byte:03d}" for byte in text.encode())
