"""Runs on the host by itself (python3): asks the edge what a stranger would, and tries every other port of ours.

Argument: JSON with "unit", "listeners" (address, port), "tls", "paths" that must not be there. Prints JSON.
"""

import contextlib
import http.client
import json
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator

SECONDS = 5


def connection(address: str, port: int, tls: bool) -> http.client.HTTPConnection:
    if not tls:
        return http.client.HTTPConnection(address, port, timeout=SECONDS)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # asked by address; its names are its own
    return http.client.HTTPSConnection(address, port, timeout=SECONDS, context=context)


def status(address: str, port: int, tls: bool, path: str, key: str | None = None) -> int:
    line = connection(address, port, tls)
    with contextlib.closing(line):
        line.request("GET", path, headers={"Authorization": f"Bearer {key}"} if key else {})
        return line.getresponse().status


def spoken(address: str, port: int) -> list[str]:
    """Versions of TLS that a handshake ends with, the oldest allowed last."""
    found = []
    for version in (ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1):
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with contextlib.suppress(OSError, ValueError):
            context.set_ciphers("ALL:@SECLEVEL=0")
            context.minimum_version = context.maximum_version = version
            with socket.create_connection((address, port), SECONDS) as line, context.wrap_socket(line) as secure:
                found.append(str(secure.version()))
    return found


def listeners() -> Iterator[tuple[str, str, int]]:
    """Unit, address and port of every TCP socket on which a unit of ours listens; `*` for all addresses."""
    for line in subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout.splitlines():
        for pid in set(re.findall(r"pid=(\d+)", line)):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/cgroup") as file:  # noqa: PTH123  # gone meanwhile
                if unit := re.search(r"/(kimi-[^/]+\.service)", file.read()):
                    address, _, port = line.split()[3].rpartition(":")
                    address = address.partition("%")[0].strip("[]").removeprefix("::ffff:")
                    yield unit[1], "*" if address in ("0.0.0.0", "::") else address, int(port)


def reachable(bound: str, port: int) -> list[str]:
    """Addresses of this host beyond loopback at which a port answers. bound: where its program listens."""
    shown = subprocess.run(["ip", "-json", "address"], capture_output=True, text=True, check=True).stdout
    all_of_them = [one for link in json.loads(shown) for one in link["addr_info"]]
    addresses = [one["local"] for one in all_of_them if one.get("scope") == "global" and bound in ("*", one["local"])]
    found = []
    for address in addresses:
        with contextlib.suppress(OSError), socket.create_connection((address, port), 2):
            found.append(f"{address}:{port}")
    return found


def main() -> None:
    asked = json.loads(sys.argv[1])
    own = {(asked["unit"], one["port"]) for one in asked["listeners"]}
    others = {(unit, place, port) for unit, place, port in listeners() if (unit, port) not in own}
    result: dict[str, object] = {
        "others": sorted(f"{unit} at {place}" for unit, bound, port in others for place in reachable(bound, port))
    }
    for one in asked["listeners"]:
        place = one["address"], one["port"], asked["tls"]
        result[f"{one['address']}:{one['port']}"] = {
            "spoken": spoken(*place[:2]) if asked["tls"] else [],
            "no key": status(*place, "/v1/models"),
            "wrong key": status(*place, "/v1/models", "a-key-that-nobody-has"),
            "paths": {path: status(*place, path) for path in asked["paths"]},
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
