"""Serving units: a catalogue entry and the host's settings in, a unit file and a run specification out. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment as Jinja
from jinja2 import FileSystemLoader, StrictUndefined

from rig import layout
from rig.catalog import ROOT, Configuration
from rig.engines import command_line, served_model_name
from rig.hostplan import HostPlan, canonical_digest

_JINJA = Jinja(
    loader=FileSystemLoader(ROOT / "templates"),
    undefined=StrictUndefined,
    keep_trailing_newline=True,
    trim_blocks=True,
    lstrip_blocks=True,
    autoescape=False,  # noqa: S701  # unit files, not HTML; quoting is systemd's, by the filter below
)


def systemd_quote(word: str) -> str:
    r"""One word of ExecStart= or Environment=, quoted so that systemd passes on exactly `word`.

    Escapes %, $ (as %% and $$), backslash, quotes and control characters (systemd.syntax(7), systemd.service(5)).
    """
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    escaped = "".join(f"\\x{ord(c):02x}" if ord(c) < 0x20 or ord(c) == 0x7F else c for c in escaped)
    return f'"{escaped}"' if escaped != word or not word or set(word) & set(" '\";") else word


def systemd_assignment(name: str, value: str) -> str:
    """NAME=value for Environment=, where $ has no special meaning (systemd.exec(5))."""
    return systemd_quote(f"{name}={value}").replace("$$", "$")


_JINJA.filters["systemd_quote"] = systemd_quote


def run_specification(plan: HostPlan, name: str) -> dict[str, Any]:
    """What `rigctl serve` needs besides the engine's argv, which the unit carries. The digest covers both."""
    configuration = plan.serving[name]
    release = plan.environments[configuration.release].release
    at = plan.locations(configuration)
    speculation = configuration.speculation
    specification: dict[str, Any] = {
        "name": name,
        "description": configuration.description,
        "engine": release.engine,
        "release": configuration.release,
        "host": configuration.listen.host,
        "port": configuration.listen.port,
        "model": served_model_name(configuration, at),
        "tool_call_parser": configuration.tool_call_parser,
        "reasoning_parser": configuration.reasoning_parser,
        "speculation": None if speculation is None else {"drafter": speculation.drafter, "steps": speculation.steps},
        "harmless_log": list(release.harmless_log),
    }
    started_as = {
        "argv": command_line(configuration, release, at),
        "env": engine_environment(plan, configuration),
    }
    return {**specification, "digest": canonical_digest({**specification, **started_as})}


def engine_environment(plan: HostPlan, configuration: Configuration) -> dict[str, str]:
    """Variables of the engine process; the entry wins over the release, the release over the host's settings."""
    release = plan.environments[configuration.release].release
    cuda = {"CUDA_HOME": plan.settings.cuda_home} if plan.settings.cuda_home else {}
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, configuration.gpus))} if configuration.gpus else {}
    return {
        **cuda,
        **visible,
        **plan.settings.environment.get(release.engine, {}),
        "HF_HUB_OFFLINE": "1",
        **release.environment,
        **configuration.environment,
    }


def conflicts(plan: HostPlan, name: str) -> list[str]:
    """Other units that claim the same GPUs or the same port: they cannot run beside this one."""
    mine = plan.serving[name]
    return sorted(
        layout.unit_name(other)
        for other, configuration in plan.serving.items()
        if other != name and (set(configuration.gpus) & set(mine.gpus) or configuration.listen.port == mine.listen.port)
    )


def unit_file(plan: HostPlan, name: str) -> str:
    """The text of kimi-<name>.service."""
    unit = layout.unit_name(name)
    others = conflicts(plan, name)
    configuration = plan.serving[name]
    release = plan.environments[configuration.release].release
    environment = engine_environment(plan, configuration)
    return _JINJA.get_template("kimi.service.j2").render(
        mark=layout.UNIT_MARK,
        name=name,
        description=(configuration.description or name).replace("%", "%%"),
        user=plan.data.service_user,
        conflicts=others,
        # Stop jobs run before start jobs between ordered units whichever way the order points (systemd.unit(5)).
        after=[other for other in others if other < unit],
        rigctl=layout.RIGCTL,
        specification=f"{layout.CONFIGURATIONS}/{name}.json",
        argv=command_line(configuration, release, plan.locations(configuration)),
        environment=[systemd_assignment(key, value) for key, value in sorted(environment.items())],
        cache=f"{layout.CACHE}/{name}",
        cache_name=f"{layout.CACHE.removeprefix('/var/cache/')}/{name}",
        api_key=f"{layout.CREDENTIALS}/api-key" if plan.data.api_key_file else None,
        device_allow=plan.settings.device_allow,
    )


def specification_file(plan: HostPlan, name: str) -> str:
    """The text of /etc/kimi-rig/configurations/<name>.json."""
    return json.dumps(run_specification(plan, name), indent=2, ensure_ascii=False, sort_keys=True) + "\n"


def unit_files(plan: HostPlan) -> Mapping[str, str]:
    """Absolute path -> text of every unit and run specification of a host."""
    files: dict[str, str] = {}
    for name in plan.serving:
        files[f"{layout.UNITS}/{layout.unit_name(name)}"] = unit_file(plan, name)
        files[f"{layout.CONFIGURATIONS}/{name}.json"] = specification_file(plan, name)
    return files
