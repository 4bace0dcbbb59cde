"""What this computer offers to a box: apt sources, proxies, CA bundle, package indexes, wheel directories.

The functions take what they read (environment, texts) as arguments; `survey` reads the computer.
"""

import configparser
import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from rig.sandbox.box import SandboxError

RELEASE = "bookworm"  # Debian 13's systemd wants cgroups v2 alone, which not every computer has
CA_DIRECTORY = Path("/etc/ssl/certs")

PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy")
CA_FILES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT", "GIT_SSL_CAINFO")
CA_PATHS = (*CA_FILES, "SSL_CERT_DIR")
INDEXES = (
    *("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST", "PIP_NO_INDEX", "PIP_DEFAULT_TIMEOUT"),
    *(
        "UV_DEFAULT_INDEX",
        "UV_INDEX",
        "UV_INDEX_URL",
        "UV_EXTRA_INDEX_URL",
        "UV_INDEX_STRATEGY",
        "UV_NO_INDEX",
    ),
    *("UV_INSECURE_HOST", "UV_HTTP_TIMEOUT", "UV_NATIVE_TLS", "UV_SYSTEM_CERTS"),
)
PIP_KEYS = ("index-url", "extra-index-url", "trusted-host", "no-index", "timeout", "proxy", "cert")
APT_KEYS = re.compile(r"Acquire::(https?::|Check-(Valid-Until|Date) |Retries )")


@dataclass(frozen=True)
class Machine:
    """What is passed into the box."""

    environment: Mapping[str, str]
    pip: Mapping[str, str]  # [global] of /etc/pip.conf
    uv_toml: str  # /etc/uv/uv.toml, as the computer has it
    apt_options: tuple[str, ...]
    apt_sources: tuple[str, ...]  # one-line format; empty: the build tool's own
    binds: tuple[Path, ...]  # bound read-only at the same path


def check_supported(system: str, machine: str, euid: int) -> None:
    """SandboxError unless this is Linux on x86_64 and we are root."""
    if system != "Linux" or machine != "x86_64":
        raise SandboxError(
            f"this machine is {system} on {machine}; the box needs Linux on x86_64: use such a machine or VM"
        )
    if euid != 0:
        raise SandboxError("systemd-nspawn and the box's files need root; run the same command with sudo")


def has_password(text: str) -> bool:
    """Whether a URL in `text` carries user information."""
    return re.search(r"://[^/\s@]+@", text) is not None


def local_directory(link: str) -> Path | None:
    """The directory a find-links or index entry names, or None when it is remote or a relative path."""
    parts = urlsplit(link)
    path = Path(unquote(parts.path)) if parts.scheme == "file" else Path(link)
    return path if path.is_absolute() else None


def index_directory(url: str) -> Path | None:
    """What to bind for a file: index. Pages under `simple` link to files beside it, so its parent."""
    if urlsplit(url).scheme != "file" or (path := local_directory(url)) is None:
        return None
    return path.parent if path.name == "simple" and len(path.parts) > 3 else path


def find_links(environ: Mapping[str, str], pip: Mapping[str, str]) -> list[str]:
    """Wheel directories and pages named by the environment or pip's settings, each once."""
    named = f"{environ.get('PIP_FIND_LINKS', '')} {pip.get('find-links', '')}".split()
    named += re.split(r"[,\s]+", environ.get("UV_FIND_LINKS", ""))
    return list(dict.fromkeys(link for link in named if link))


def pip_settings(texts: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The [global] and [install] settings of pip's files, (name, content) each; later ones win."""
    settings: dict[str, str] = {}
    for name, text in texts:
        parser = configparser.RawConfigParser()
        try:
            parser.read_string(text)
        except configparser.Error as error:
            raise SandboxError(f"{name}: pip's settings cannot be read: {error.message}") from None
        for section in ("global", "install"):
            if parser.has_section(section):
                settings.update((key.replace("_", "-"), value) for key, value in parser.items(section))
    return settings


def passed_environment(environ: Mapping[str, str], links: list[str], pip: Mapping[str, str]) -> dict[str, str]:
    """Variables the box gets.

    Left out: paths that do not exist here, and values that /etc/environment cannot hold.
    """
    passed = {name: environ[name] for name in INDEXES if environ.get(name)}
    passed |= {name: environ[name] for name in CA_PATHS if Path(environ.get(name) or "/nonexistent").exists()}
    for name in PROXIES:
        if value := environ.get(name) or environ.get(name.upper()):
            passed |= {name: value, name.upper(): value}
    if any(name in passed for name in PROXIES):
        without = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
        value = ",".join(dict.fromkeys([*filter(None, without.split(",")), "localhost", "127.0.0.1", "::1"]))
        passed |= {"no_proxy": value, "NO_PROXY": value}
    if links:
        passed |= {"PIP_FIND_LINKS": " ".join(links), "UV_FIND_LINKS": ",".join(links)}
    mirror = environ.get("PIP_INDEX_URL") or pip.get("index-url", "")
    # uv has no file: index of pip's kind; a remote mirror set for pip alone is meant for uv too.
    if mirror.startswith("http") and not {"UV_DEFAULT_INDEX", "UV_INDEX_URL"} & passed.keys():
        passed["UV_DEFAULT_INDEX"] = mirror
    return {name: value for name, value in passed.items() if value.isprintable() and not set('"#\\') & set(value)}


def bound_paths(environment: Mapping[str, str], links: list[str], pip: Mapping[str, str]) -> tuple[Path, ...]:
    """Directories and CA files of this computer that the box must see, existing ones only, none twice."""
    wanted = [CA_DIRECTORY] if (CA_DIRECTORY / "ca-certificates.crt").exists() else []
    wanted += [Path(environment[name]) for name in CA_PATHS if name in environment]
    wanted += [Path(pip["cert"])] if "cert" in pip else []
    wanted += filter(None, map(local_directory, links))
    urls = " ".join(environment.get(name, "") for name in INDEXES if "INDEX" in name).replace(",", " ").split()
    urls += f"{pip.get('index-url', '')} {pip.get('extra-index-url', '')}".split()
    wanted += filter(None, map(index_directory, urls))
    paths: list[Path] = []
    for path in sorted({Path(os.path.normpath(path)) for path in wanted if path.exists()}):
        if not any(path.is_relative_to(other) for other in paths):
            paths.append(path)
    return tuple(paths)


def proxy_options(environment: Mapping[str, str]) -> list[str]:
    """apt's settings for the proxies of the environment."""
    pairs = (("http", environment.get("http_proxy")), ("https", environment.get("https_proxy")))
    return [f'Acquire::{scheme}::Proxy "{proxy}";' for scheme, proxy in pairs if proxy]


def one_line_sources(text: str) -> list[str]:
    """This release's own entries of a one-line sources list."""
    kept = []
    for line in text.splitlines():
        entry = re.fullmatch(r"deb\s+(\[[^]]*\]\s+)?(\S+)\s+(\S+)\s+(.+)", line.split("#")[0].strip())
        if entry and _own_suite(entry[3]) and "main" in entry[4].split():
            kept.append(" ".join(line.split("#")[0].split()))
    return kept


def deb822_sources(text: str) -> list[str]:
    """This release's own stanzas of a deb822 file, as one-line entries."""
    kept = []
    for stanza in re.split(r"\n\s*\n", re.sub(r"(?m)^#.*\n?", "", text)):
        fields = {key.lower(): value for key, value in re.findall(r"(?m)^([\w-]+):[ \t]*(.*(?:\n[ \t].*)*)", stanza)}
        signed = fields.get("signed-by", "").strip()
        if (
            "deb" not in fields.get("types", "").split()
            or fields.get("enabled", "yes").strip() == "no"
            or "main" not in fields.get("components", "").split()
            or "\n" in signed  # a key in the stanza itself has no one-line form
        ):
            continue
        options = [f"signed-by={signed}"] if signed else []
        options += ["trusted=yes"] if fields.get("trusted", "").strip() == "yes" else []
        prefix = f"deb [{' '.join(options)}]" if options else "deb"
        components = " ".join(fields["components"].split())
        suites = [suite for suite in fields.get("suites", "").split() if _own_suite(suite)]
        kept += [f"{prefix} {uri} {suite} {components}" for uri in fields.get("uris", "").split() for suite in suites]
    return kept


def _own_suite(suite: str) -> bool:
    return suite in (RELEASE, f"{RELEASE}-updates", f"{RELEASE}-security", f"{RELEASE}-backports")


def survey(environ: Mapping[str, str] = os.environ) -> Machine:
    """Read what this computer has to pass on."""
    pip = pip_settings(_pip_files(environ))
    links = find_links(environ, pip)
    environment = passed_environment(environ, links, pip)
    settings = {key: pip[key] for key in PIP_KEYS if key in pip}
    if links:
        settings["find-links"] = " ".join(links)
    options = [*_apt_settings(), *proxy_options(environment)]
    return Machine(
        environment=environment,
        pip=settings,
        uv_toml=_uv_settings(environ),
        apt_options=tuple(dict.fromkeys(options)),
        apt_sources=tuple(_apt_sources()),
        binds=bound_paths(environment, links, pip),
    )


def _pip_files(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    home = Path(environ.get("HOME") or "/root")
    config = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    paths = [Path("/etc/xdg/pip/pip.conf"), Path("/etc/pip.conf")]
    paths += [home / ".pip/pip.conf", config / "pip/pip.conf"]
    paths += [Path(extra)] if (extra := environ.get("PIP_CONFIG_FILE")) else []
    return [(str(path), path.read_text(encoding="utf-8")) for path in paths if path.is_file()]


def _uv_settings(environ: Mapping[str, str]) -> str:
    config = Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME") or "/root", ".config"))
    there = (path for path in (config / "uv/uv.toml", Path("/etc/uv/uv.toml")) if path.is_file())
    return next((path.read_text(encoding="utf-8") for path in there), "")


def _apt_settings() -> list[str]:
    try:
        dump = subprocess.run(["apt-config", "dump"], capture_output=True, errors="replace", check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [line for line in dump.splitlines() if APT_KEYS.match(line) and not line.endswith('"";')]


def _apt_sources() -> list[str]:
    release = Path("/etc/os-release").read_text(encoding="utf-8") if Path("/etc/os-release").exists() else ""
    if not re.search(r"(?m)^ID=debian$", release) or not re.search(rf"(?m)^VERSION_CODENAME={RELEASE}$", release):
        return []
    directory = Path("/etc/apt/sources.list.d")
    found: list[str] = []
    for path in [Path("/etc/apt/sources.list"), *sorted(directory.glob("*.list"))]:
        found += one_line_sources(path.read_text(encoding="utf-8")) if path.is_file() else []
    for path in sorted(directory.glob("*.sources")):
        found += deb822_sources(path.read_text(encoding="utf-8"))
    return list(dict.fromkeys(found))
