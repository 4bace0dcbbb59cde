"""The exact lines with which to talk to a deployed host: a tunnel where it listens on loopback, and a request. Pure."""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rig.catalog.entries import Checkpoint, Configuration
from rig.plan.host_plan import HostData, chosen_serving, reached
from rig.plan.secrets import PROMPT
from rigctl.contract import layout


def talk_lines(name: str, data: Mapping[str, Any]) -> list[str]:
    """Shell lines for one host: start a configuration, reach it, ask it. data: the host's inventory data.

    Raises CatalogError for wrong data.
    """
    host, serving, checkpoints = chosen_serving(data)
    if not serving:
        return []
    edge, serving = reached(host, serving)
    first = next(iter([*host.at_boot, *serving]))
    entry = serving[first]
    sudo = "sudo " if data.get("_sudo") else ""
    start = f"{sudo}systemctl start {layout.unit_name(first)}"
    lines = [shlex.join([*ssh_words(name, data), start]) if name != "@local" else start]
    model = model_name(entry, checkpoints, host)
    through = [one for one in edge.listeners if first in one.engines] if edge else []
    if edge and through:
        # A certificate is for a name as a rule; an address of a private network may be the only way.
        named = edge.tls or through[0].everywhere
        address = f"{data.get('ssh_hostname') or name}:{through[0].port}" if named else through[0].place
        key = host.api_key_file or next(iter(edge.key_files.values()), None)
        return [*lines, curl_line(address, model, key, "https" if edge.tls else "http")]
    port = entry.listen.port
    address = f"127.0.0.1:{port}"
    # A host that is reached over loopback, such as the sandbox, shares this computer's addresses.
    here = name == "@local" or str(data.get("ssh_hostname") or name).startswith(("127.", "localhost"))
    if not here:
        # Where another user of this computer holds the port, there is no tunnel, and no request follows.
        tunnel = ["-f", "-N", "-o", "ExitOnForwardFailure=yes", "-L", f"{port}:{entry.listen.host}:{port}"]
        lines.append(shlex.join(ssh_words(name, data, *tunnel)) + " &&")
    lines.append(curl_line(address, model, host.api_key_file))
    return lines


def ssh_words(name: str, data: Mapping[str, Any], *options: str) -> list[str]:
    """OpenSSH's command line for a host of an inventory."""
    words = ["ssh", *options]
    config = data.get("ssh_config_file")
    words += ["-F", str(config)] if config else []
    if not config:
        words += ["-p", str(data["ssh_port"])] if data.get("ssh_port") else []
        words += ["-i", str(data["ssh_key"])] if data.get("ssh_key") else []
        known = data.get("ssh_known_hosts_file")
        words += ["-o", f"UserKnownHostsFile={known}"] if known else []
    target = name if config else str(data.get("ssh_hostname") or name)
    user = "" if config or not data.get("ssh_user") else f"{data['ssh_user']}@"
    return [*words, f"{user}{target}"]


def model_name(entry: Configuration, checkpoints: Mapping[str, Checkpoint], host: HostData) -> str:
    """The model name that requests carry."""
    path = checkpoints[entry.target].path.format(models=host.models, drafters=host.drafters)
    return entry.served_model_name or path


def curl_line(address: str, model: str, api_key_file: str | None, scheme: str = "http") -> str:
    """One chat completion by curl. A key stays out of the command line: curl reads the header from a pipe."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]})
    words = ["curl", "-sS", f"{scheme}://{address}/v1/chat/completions", "-H", "Content-Type: application/json"]
    line = shlex.join([*words, "-d", body])
    if api_key_file == PROMPT:
        return f"{line} -H @<(read -rsp 'API key: ' k; echo \"Authorization: Bearer $k\")"
    if api_key_file:
        # Left open to the shell: ~ is the operator's home.
        path = api_key_file if api_key_file.startswith("~/") else shlex.quote(api_key_file)
        return f"{line} -H @<(sed 's/^/Authorization: Bearer /' {path})"
    return line


def talk_text(hosts: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """What a deploy says at its end, for the hosts named. hosts: as `debug-inventory --json` gives them."""
    found = {host["name"]: host["data"] for host in hosts}
    blocks = []
    for name in names:
        if lines := talk_lines(name, found[name]):
            head = f"talk to {name} (the first line takes minutes and stops what serves there):"
            blocks.append("\n".join([head, *(f"  {line}" for line in lines)]))
    return "\n".join(blocks)
