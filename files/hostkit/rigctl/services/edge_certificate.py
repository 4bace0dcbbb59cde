"""`rigctl edge-certificate`: an authority of this host's own, and the certificate that it issues for the edge.

The authority can vouch for the edge's names alone (name constraints), so that whoever trusts it trusts this host for
nothing else. Its key is root's; the certificate is renewed long before it ends.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rigctl.contract import layout
from rigctl.errors import RigctlError
from rigctl.services.systemd import properties, systemctl
from rigctl.whole_files import write_whole

AUTHORITY_KEY = Path(layout.CREDENTIALS, "edge-authority.key")
AUTHORITY = Path(layout.EDGE, "authority.pem")
CERTIFICATE = Path(layout.EDGE, "tls.pem")
AUTHORITY_DAYS, DAYS, RENEW_DAYS = 3650, 90, 30
NO_NAME, NO_ADDRESS = "DNS:invalid", "IP:255.255.255.255/255.255.255.255"
"""Permitted where nothing of the kind is: of a kind that no constraint names everything would be permitted."""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("edge-certificate", help="issue or renew the edge's certificate (used by systemd)")
    parser.add_argument("names", nargs="+", help="host names and addresses of the edge")
    parser.add_argument("--check", action="store_true", help="only say why a new one is needed; nothing when it is not")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Issue what is needed, and let the edge read it. Raises RigctlError when openssl fails."""
    why = needed(arguments.names)
    if why is None:
        return 0
    print(why, flush=True)
    if arguments.check:
        return 0
    with tempfile.TemporaryDirectory(prefix="rigctl-edge-") as place:
        issue(Path(place), arguments.names)
    if properties(layout.EDGE_UNIT, ["ActiveState"])["ActiveState"] == "active":
        systemctl("reload", layout.EDGE_UNIT)
    return 0


def needed(names: Sequence[str]) -> str | None:
    """Why a new certificate must be issued; None while there is a good one."""
    try:
        written = [path.read_text().partition("\n")[0] for path in (AUTHORITY, CERTIFICATE)]
    except OSError:
        return "there is no certificate"
    if written != [_head(names)] * 2:
        return "the certificate is for other names"
    if not _openssl("x509", "-noout", "-in", str(CERTIFICATE), "-checkend", str(RENEW_DAYS * 86400), fails=True):
        return f"the certificate ends within {RENEW_DAYS} days"
    if not _openssl("verify", "-CAfile", str(AUTHORITY), str(CERTIFICATE), fails=True):
        return "the certificate is not of this host's authority"
    return None


def issue(place: Path, names: Sequence[str]) -> None:
    """A new certificate, by the authority that is there or, for other names, by a new one."""
    try:
        there = AUTHORITY.read_text().partition("\n")[0] == _head(names) and AUTHORITY_KEY.is_file()
    except OSError:
        there = False
    if not there:
        constraints = ",".join(f"permitted;{one}" for one in _constraints(names))
        _key(place / "authority.key")
        subject = f"/O=kimi-rig/CN=authority of {names[0][:40]}"
        extensions = ("basicConstraints=critical,CA:TRUE,pathlen:0", "keyUsage=critical,keyCertSign,cRLSign")
        options = [f"-addext={one}" for one in (*extensions, f"nameConstraints=critical,{constraints}")]
        request = ["req", "-x509", "-new", "-key", str(place / "authority.key"), "-subj", subject]
        made = _openssl(
            *request, "-days", str(AUTHORITY_DAYS), *(part for one in options for part in one.split("=", 1))
        )
        write_whole(AUTHORITY_KEY, (place / "authority.key").read_text(), mode=0o600)
        write_whole(AUTHORITY, f"{_head(names)}\n{made}")
    _key(place / "edge.key")
    (place / "extensions").write_text(
        "basicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature\nextendedKeyUsage=serverAuth\n"
        f"subjectAltName={','.join(_alternative(name) for name in names)}\n"
    )
    _openssl(
        *("req", "-new", "-key", str(place / "edge.key"), "-subj", "/O=kimi-rig", "-out", str(place / "request")),
    )
    signed = _openssl(
        *("x509", "-req", "-in", str(place / "request"), "-days", str(DAYS), "-extfile", str(place / "extensions")),
        *("-CA", str(AUTHORITY), "-CAkey", str(AUTHORITY_KEY), "-set_serial", f"0x{os.urandom(16).hex()}"),
    )
    _publish(f"{_head(names)}\n{signed}{(place / 'edge.key').read_text()}")


def _publish(text: str) -> None:
    """The certificate with its key, for the edge's user to read."""
    fresh = CERTIFICATE.with_name(".tls.pem.new")
    write_whole(fresh, text, mode=0o600)
    shutil.chown(fresh, group=layout.EDGE_USER)
    fresh.chmod(0o640)
    fresh.replace(CERTIFICATE)


def _constraints(names: Sequence[str]) -> Iterator[str]:
    found = [_alternative(name) for name in names]
    yield from (one for one in found if one.startswith("DNS:"))
    if not any(one.startswith("DNS:") for one in found):
        yield NO_NAME
    for name in names:
        if (address := _address(name)) is not None:
            yield f"IP:{address}/{ipaddress.ip_network(address).netmask}"
    if not any(one.startswith("IP:") for one in found):
        yield NO_ADDRESS


def _alternative(name: str) -> str:
    return f"DNS:{name}" if _address(name) is None else f"IP:{name}"


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _head(names: Sequence[str]) -> str:
    return f"kimi-rig edge: {' '.join(names)}"


def _key(path: Path) -> None:
    curve = ("-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256")
    path.touch(0o600)
    _openssl("genpkey", *curve, "-out", str(path))


def _openssl(*arguments: str, fails: bool = False) -> str:
    """What openssl prints; with `fails` nothing where it says no. Raises RigctlError."""
    done = subprocess.run(["openssl", *arguments], capture_output=True, errors="replace", check=False)
    if done.returncode == 0:
        return done.stdout or "yes"
    if fails:
        return ""
    raise RigctlError(f"openssl {arguments[0]}: {done.stderr.strip()}")
