"""The plan of the host that pyinfra is working on."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from pyinfra import host
from pyinfra.api.exceptions import PyinfraError

from rig.catalog.yaml_source import CatalogError
from rig.facts.report import HostReport
from rig.facts.state import HostBasics, Privilege
from rig.host.settings import settings_from_gpus
from rig.plan.host_plan import HostPlan, host_plan, plan_from_facts, questions
from rig.plan.secrets import SecretError, key_digest, read_certificate, read_certificates, read_secret

_T = TypeVar("_T")


def check_privilege() -> None:
    """Raises PyinfraError unless we are root on the host, by login or by a sudo that asks for nothing.

    pyinfra itself asks for sudo's password at the terminal, again and again, or dies of the lack of one.
    """
    sudo = bool(host.data.get("_sudo"))
    found = host.get_fact(Privilege, sudo=sudo, _sudo=False)
    if found.root:
        return
    user = found.user or host.data.get("ssh_user") or "the login"
    if sudo:
        why = found.trouble or "sudo failed"
        cure = f"give {user} NOPASSWD in /etc/sudoers.d, or log in as root by key"
        raise PyinfraError(f"{host.name}: sudo refuses {user} without a password ({why}): {cure}")
    raise PyinfraError(f'{host.name}: {user} is not root: set "_sudo": True in the host\'s data, or log in as root')


def current_plan() -> HostPlan:
    """Read the host, bare or not, and build its plan. Two remote commands.

    A host without python3 is planned from the little that sh can read, and decided in full by the next deploy.
    Raises PyinfraError, naming the host, for wrong data or a host that is not supported.
    """
    check_privilege()
    data = _data()
    try:
        facts = host.get_fact(HostReport, wanted=questions(data))
        if facts.machine not in ("x86_64", None):
            raise CatalogError(f"its processor is {facts.machine}; the engines are built for x86_64")
        if "host" not in facts.unknown:
            return plan_from_facts(data, facts)
        basics = host.get_fact(HostBasics)
        return replace(host_plan(data, basics.distribution, settings_from_gpus(len(basics.gpus))), facts=facts)
    except CatalogError as error:
        raise PyinfraError(f"{host.name}: {error}") from None


def _data() -> dict[str, Any]:
    found: dict[str, Any] = host.data.dict()  # type: ignore[no-untyped-call]  # pyinfra leaves it untyped
    return found


def operator_secret(source: str, what: str) -> bytes:
    """A secret of the operator's (rig.plan.secrets). Raises PyinfraError, naming the host."""
    return _told(read_secret, source, what)


def operator_key_digest(source: str, what: str) -> str:
    """The digest of a client's key (rig.plan.secrets). Raises PyinfraError, naming the host."""
    return _told(key_digest, source, what)


def operator_certificate(certificate: str, key: str) -> bytes:
    """A certificate of the operator's (rig.plan.secrets). Raises PyinfraError, naming the host."""
    return _told(read_certificate, certificate, key)


def operator_roots(path: str) -> bytes:
    """Certificates in a file of the operator's. Raises PyinfraError, naming the host."""
    return _told(read_certificates, path)


def _told(read: Callable[..., _T], *words: str) -> _T:
    try:
        return read(*words)
    except SecretError as error:
        raise PyinfraError(f"{host.name}: {error}") from None
