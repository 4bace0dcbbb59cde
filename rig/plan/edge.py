"""The edge: the one program that other machines reach. TLS, keys and paths in front of engines on loopback. Pure.

A host gets one where its data has `edge`, or where a configuration listens beyond loopback: its address, port, networks
and key are the edge's then, and the engine moves to a loopback port.
"""

import ipaddress
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from rig.catalog.entries import Configuration, Listen, Network
from rig.catalog.yaml_source import CatalogError
from rigctl.contract import layout
from rigctl.contract.fields import Positive, Text, WebAddress, ip_address
from rigctl.contract.order import Part

PRIVATE = [
    ipaddress.ip_network(network)
    for network in (
        *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16"),
        *("100.64.0.0/10", "::1/128", "fc00::/7", "fe80::/10"),
    )
]
"""Loopback, private (RFC 1918, RFC 4193), link-local, and the range of overlay networks (RFC 6598)."""
LOOPBACK = ("127.0.0.0/8", "::1/128")
FIRST_KEY = "api-key"
"""Name of the key that the host's api_key_file gives."""


def _key_source(source: str) -> str:
    digest = source.removeprefix("sha256:")
    if digest != source and not re.fullmatch("[0-9a-f]{64}", digest):
        raise ValueError("a digest is sha256: and 64 hex digits, 0-9 and a-f")
    if source == "prompt":
        raise ValueError("name a file on your machine, or sha256: and the key's digest; only api_key_file can be asked")
    return source


def _domain_name(name: str) -> str:
    if len(name) > 253 or not re.fullmatch(r"([a-z0-9]([a-z0-9-]*[a-z0-9])?\.)*[a-z]([a-z0-9-]*[a-z0-9])?", name):
        raise ValueError("a host name is in lower case: letters, digits, '-' and '.'")
    return name


def _certificate_name(name: str) -> str:
    return ip_address(name) if re.fullmatch(r"[0-9A-Fa-f]*:[0-9A-Fa-f:.]*|[0-9.]+", name) else _domain_name(name)


def _canonical(network: str) -> str:
    return str(ipaddress.ip_network(network, strict=False))


KeyName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,59}$")]
KeySource = Annotated[str, StringConstraints(min_length=1), AfterValidator(_key_source)]
DomainName = Annotated[str, AfterValidator(_domain_name)]
CertificateName = Annotated[str, AfterValidator(_certificate_name)]
EdgeNetwork = Annotated[Network, AfterValidator(_canonical)]


class Acme(Part):
    """A certificate of an authority that speaks ACME, such as Let's Encrypt: it asks port 80 of each name."""

    names: Annotated[list[DomainName], Field(min_length=1)]
    email: Annotated[str, StringConstraints(pattern=r"^[\w.+-]+@[\w.-]+$")]
    directory: WebAddress = "https://acme-v02.api.letsencrypt.org/directory"
    roots: Text | None = None
    """A file on the machine you deploy from: certificates by which a private authority itself is known, as PEM."""


class Tls(Part):
    """Where the certificate comes from: one of three."""

    certificate: Text | None = None
    """Files on the machine you deploy from: the certificate with its chain, and its key (mode 600), as PEM."""
    key: Text | None = None
    authority: list[CertificateName] = []
    """Names and addresses for which an authority of the host's own issues a certificate."""

    acme: Acme | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key belong together")
        if [self.certificate is not None, bool(self.authority), self.acme is not None].count(True) != 1:
            raise ValueError("names one of these: certificate and key, authority, acme")
        return self


class EdgeLimits(Part):
    """What one client may take."""

    request_mib: Annotated[int, Field(ge=1, le=1024)] = 64
    """Size of a request's body."""
    requests_a_minute: Positive = 600
    """For each key; for each address where no key is asked for."""
    connections: Annotated[int, Field(ge=16, le=100_000)] = 1000
    """Of all clients together."""
    connections_an_address: Positive = 300
    """Of one address (IPv6: a /64), so that it cannot hold all of them; more than engines run requests at once."""


class EdgeData(Part):
    """Host data `edge`; docs/reference/edge.md."""

    address: Annotated[str, AfterValidator(ip_address)]
    port: Annotated[int, Field(ge=1, le=65535)] = 8443
    tls: Tls | Literal["none"]
    keys: dict[KeyName, KeySource] = {}
    networks: list[EdgeNetwork] = []
    metrics_networks: list[EdgeNetwork] = []
    limits: EdgeLimits = EdgeLimits()

    @model_validator(mode="after")
    def _plain_text_stays_at_home(self) -> Self:
        address = ipaddress.ip_address(self.address)
        if self.tls == "none" and not any(address in network for network in PRIVATE):
            raise ValueError(
                f'tls "none" sends keys and answers in plain text: {self.address} is not an address of a private '
                "network; name one, or a certificate"
            )
        return self


@dataclass(frozen=True)
class Group:
    """Engines that the same networks reach. networks: none: everyone. engines: configurations, by name."""

    name: str
    networks: Sequence[str]
    engines: Mapping[str, Configuration]


@dataclass(frozen=True)
class Listener:
    """One address of the edge."""

    name: str
    address: str
    port: int
    groups: Sequence[Group] = ()

    @property
    def place(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"

    @property
    def everywhere(self) -> bool:
        """Whether it listens at every address of the host."""
        return ipaddress.ip_address(self.address).is_unspecified

    @property
    def nearby(self) -> str:
        """Where this machine itself reaches it."""
        return self.address if not self.everywhere else "::1" if ":" in self.address else "127.0.0.1"

    @property
    def local(self) -> list[str]:
        """Networks from which this machine itself comes."""
        here = [] if self.everywhere else [_canonical(self.address)]
        return [*LOOPBACK, *here]

    @property
    def networks(self) -> list[str]:
        """Networks that reach any of its engines; none: everyone."""
        if not all(group.networks for group in self.groups):
            return []
        return sorted({network for group in self.groups for network in group.networks})

    @property
    def engines(self) -> dict[str, Configuration]:
        """All configurations behind it, by name."""
        return {name: entry for group in self.groups for name, entry in group.engines.items()}

    def meets(self, listen: Listen) -> bool:
        """Whether an engine cannot listen there while the edge listens here."""
        return meet((self.address, self.port), (listen.host, listen.port))


@dataclass(frozen=True)
class Edge:
    """What the edge of one host is. keys: name -> where the key is; none: no key is asked for.

    taken_over: configuration -> where it listened before, as its entry still says.
    """

    listeners: Sequence[Listener]
    tls: Tls | None
    keys: Mapping[str, str]
    metrics_networks: Sequence[str]
    limits: EdgeLimits
    taken_over: Mapping[str, Listen]

    @property
    def packages(self) -> list[str]:
        """Debian packages that it needs."""
        tls = self.tls
        more = {"openssl": tls is not None and tls.authority, "lego": tls is not None and tls.acme}
        return ["haproxy", *(name for name, needed in more.items() if needed)]

    @property
    def key_files(self) -> dict[str, str]:
        """Name -> file on the operator's machine, for each key of `keys` in the host's data that is in one."""
        return {
            name: source for name, source in self.keys.items() if name != FIRST_KEY and not source.startswith("sha256:")
        }

    def before(self, configuration: Configuration) -> bool:
        """Whether clients reach this configuration, or one derived from it for a benchmark, through the edge."""
        mine = configuration.listen
        return any(
            mine.loopback and mine.port == entry.listen.port for one in self.listeners for entry in one.engines.values()
        )


def meet(one: tuple[str, int], other: tuple[str, int]) -> bool:
    """Whether two programs cannot listen at both places, addresses with ports, at a time."""
    hosts = [ipaddress.ip_address("127.0.0.1" if host == "localhost" else host) for host, _ in (one, other)]
    return one[1] == other[1] and (hosts[0] == hosts[1] or any(host.is_unspecified for host in hosts))


def edge_of(
    data: EdgeData | None, api_key_file: str | None, serving: Mapping[str, Configuration]
) -> tuple[Edge | None, dict[str, Configuration]]:
    """The edge of a host, and its configurations as their engines listen: on loopback.

    Raises CatalogError for what cannot stand behind an edge.
    """
    beyond = {name: entry.listen for name, entry in serving.items() if not entry.listen.loopback}
    if data is None and not beyond:
        return None, dict(serving)
    keys = {FIRST_KEY: api_key_file} if api_key_file else {}
    if data is None:
        places = dict.fromkeys((listen.host, listen.port) for listen in beyond.values())
        listeners = [Listener(_name(number), *place) for number, place in enumerate(places, 1)]
        moved = _moved(listeners, serving)
        listeners = [replace(one, groups=[*_groups(one, serving, moved)]) for one in listeners]
        return Edge(listeners, None, keys, (), EdgeLimits(), beyond), moved
    if FIRST_KEY in data.keys and keys:
        raise CatalogError(f"host data edge.keys: {FIRST_KEY} is the key in api_key_file: name this one otherwise")
    keys |= data.keys
    if not keys:
        raise CatalogError("host data edge.keys: there is no key: name one, or set api_key_file")
    listener = Listener(_name(1), data.address, data.port)
    _refuse_other_addresses(listener, data.networks, beyond)
    moved = {name: _at_home(entry) for name, entry in _moved([listener], serving).items()}
    listener = replace(listener, groups=[Group(f"{listener.name}.1", data.networks, moved)])
    tls = None if data.tls == "none" else data.tls
    return Edge([listener], tls, keys, data.metrics_networks, data.limits, beyond), moved


def _name(number: int) -> str:
    return "edge" if number == 1 else f"edge-{number}"


def _groups(
    listener: Listener, serving: Mapping[str, Configuration], moved: Mapping[str, Configuration]
) -> Iterator[Group]:
    """The entries that named this address, and those on loopback that cannot keep theirs beside it."""
    groups: dict[tuple[str, ...], dict[str, Configuration]] = {}
    for name, entry in serving.items():
        listen = entry.listen
        if (listen.host, listen.port) == (listener.address, listener.port):
            groups.setdefault(tuple(map(_canonical, listen.networks)), {})[name] = moved[name]
        elif listen.loopback and listener.meets(listen):
            groups.setdefault(LOOPBACK, {})[name] = moved[name]
    for number, (networks, engines) in enumerate(groups.items(), 1):
        yield Group(f"{listener.name}.{number}", networks, engines)


def _refuse_other_addresses(listener: Listener, networks: Sequence[str], beyond: Mapping[str, Listen]) -> None:
    for name, listen in beyond.items():
        same = (listen.host, listen.port) == (listener.address, listener.port)
        others = {*map(_canonical, listen.networks)} - {*networks}
        if not same or others or listen.open_without_key:
            raise CatalogError(
                f"serving.{name} listens on {listen.host}:{listen.port}, and this host's edge on {listener.place}: "
                "the edge is what others reach. Take host, networks and open_without_key out of the entry's `listen`, "
                "or make them the edge's"
            )


def _moved(listeners: Sequence[Listener], serving: Mapping[str, Configuration]) -> dict[str, Configuration]:
    """The configurations on loopback, each at its own port where the edge leaves it free and else at another."""
    taken = {one.port for one in listeners} | {entry.listen.port for entry in serving.values()}
    ports: dict[int, int] = {}
    moved = dict(serving)
    for name, entry in serving.items():
        port = entry.listen.port
        if entry.listen.loopback and not any(one.meets(entry.listen) for one in listeners):
            continue
        if port not in ports:
            ports[port] = _free_port(port, taken | {*ports.values()})
        moved[name] = entry.model_copy(update={"listen": Listen(host="127.0.0.1", port=ports[port])})
    return moved


def _at_home(entry: Configuration) -> Configuration:
    """An entry at the one address of loopback where the edge looks for engines."""
    listen = entry.listen
    at_home = listen.host in ("127.0.0.1", "localhost")
    return entry if at_home else entry.model_copy(update={"listen": Listen(host="127.0.0.1", port=listen.port)})


def _free_port(port: int, taken: set[int]) -> int:
    """A port that no configuration of the host names, the same in every plan."""
    wanted = port + 10_000 if port < 50_000 else port - 10_000
    while wanted in taken:
        wanted += 1
    return wanted


def takeovers(edge: Edge) -> Iterator[str]:
    """What changes where the edge takes an address over from engines, for the operator: a line a listener."""
    for listener in edge.listeners:
        names = [name for name in listener.engines if name in edge.taken_over]
        if not names:
            continue
        units = ", ".join(layout.unit_name(name) for name in names)
        ports = ", ".join(sorted({str(listener.engines[name].listen.port) for name in names}))
        kept = "networks and key" if edge.keys else "networks"
        plain = "" if edge.tls else "; still plain HTTP: host data `edge` brings TLS"
        yield (
            f"{layout.EDGE_UNIT} takes {listener.place} over from {units}: clients keep address, {kept}; the engine "
            f"moves to 127.0.0.1:{ports} at its next start; paths that are not of the API answer 404{plain}"
        )
