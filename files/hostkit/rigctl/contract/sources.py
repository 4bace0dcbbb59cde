"""Where a checkpoint's files come from: in an entry of the catalogue, and in the job that a host gets."""

from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from rigctl.contract.fields import Address, Commit, HostPath, Text, WebAddress
from rigctl.contract.order import Part


class Files(Part):
    """A source of files. include, exclude: shell patterns over relative paths, where * crosses /; exclude wins."""

    include: Annotated[list[Text], Field(min_length=1)] = ["*"]
    exclude: list[Text] = []

    def selects(self, path: str) -> bool:
        kept, dropped = (any(fnmatchcase(path, one) for one in found) for found in (self.include, self.exclude))
        return kept and not dropped


class HubSource(Files):
    """Files of a model hub repository at a pinned revision."""

    kind: Literal["hub"]
    repository: Annotated[str, StringConstraints(pattern=r"^[\w.-]+/[\w.-]+$")]
    revision: Commit | None = None
    endpoint: WebAddress | None = None
    """Unset: https://huggingface.co, with HF_ENDPOINT of the host as a further mirror. Lists the digests where there is
    no manifest, and gets the token, over https only."""
    mirror: WebAddress | None = None
    """Sends files when the endpoint does not; never asked for digests, never gets the token."""
    transfer: Literal["auto", "http", "xet"] = "auto"
    """auto: the hub's chunked transfer for large files, else HTTP ranges (docs/reference/checkpoints.md)."""
    allow_unpinned: bool = False
    """In as many words: without a revision, take what the hub calls main on the day it is staged."""


class HttpSource(Files):
    """A directory on a web server, with a manifest."""

    kind: Literal["http"]
    url: WebAddress
    manifest_url: WebAddress | None = None
    """Unset: manifest.json below url. Over https, where there is no manifest in the inventory."""
    mirror: WebAddress | None = None


class RsyncSource(Files):
    """A directory of another host, over SSH."""

    kind: Literal["rsync"]
    host: Address
    path: HostPath
    user: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.-]*$")] = "root"
    port: Annotated[int, Field(ge=1, le=65535)] = 22
    identity_file: HostPath | None = None
    """Private key on the host that is deployed to, readable by its owner only; unset: root's own keys."""
    known_hosts: HostPath | None = None
    """File on that host with the other one's key; unset: root's own. An unknown key is refused."""


class LocalSource(Files):
    """A directory of the host itself, such as a mounted disk: copied, never moved or linked."""

    kind: Literal["local"]
    path: HostPath


class DirectorySource(Files):
    """Files that are already on the host and are adopted where they lie."""

    kind: Literal["directory"]


class GeneratorSource(Part):
    """A tiny checkpoint made on the host by `rigctl tiny-model`."""

    kind: Literal["generator"]
    generator: Text

    def selects(self, path: str) -> bool:
        """Every file that it makes belongs to the checkpoint."""
        return True


Source = Annotated[
    HubSource | HttpSource | RsyncSource | LocalSource | DirectorySource | GeneratorSource,
    Field(discriminator="kind"),
]


def described(source: Source) -> str:
    """Where a checkpoint comes from, in a few words."""
    match source:
        case (
            HubSource(repository=words)
            | HttpSource(url=words)
            | LocalSource(path=words)
            | GeneratorSource(generator=words)
        ):
            return words
        case RsyncSource(host=host, path=path):
            return f"{host}:{path}"
    return source.kind
