"""The order for one checkpoint (/etc/kimi-rig/checkpoints/<name>.json): what shall lie where, and how it gets there."""

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from rigctl.contract.fields import Count, HostPath, Positive, Sha256, Text
from rigctl.contract.order import Order, Part
from rigctl.contract.sources import GeneratorSource, HttpSource, HubSource, Source

Role = Literal["target", "drafter"]
NAME = r"[a-z0-9][a-z0-9._-]{0,79}"
"""A checkpoint's name becomes a file name and part of a unit's name."""
CheckpointName = Annotated[str, StringConstraints(pattern=f"^{NAME}$")]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Secret(Part):
    """Where a secret lies, never the secret: a systemd credential's name, or a file that only its owner reads."""

    credential: Annotated[str, StringConstraints(pattern=r"^[\w.-]+$")] | None = None
    file: HostPath | None = None

    @model_validator(mode="after")
    def _is_in_one_place(self) -> Self:
        if (self.credential is None) == (self.file is None):
            raise ValueError("a secret is either a credential or a file")
        return self


class CheckpointJob(Order):
    """Bring one checkpoint to its destination. Durations are seconds, sizes bytes, rates bytes a second.

    How it gets there is its source's kind: it is fetched, generated, or adopted where it lies.
    """

    name: CheckpointName
    role: Role = "target"
    destination: HostPath
    source: Source
    token: Secret | None = None
    """Shown to the hub or web server, never to a mirror."""
    generator_revision: Text | None = None
    """Version of the generator: another one makes another checkpoint."""
    manifest: HostPath | None = None
    """File with the manifest of the pinned content; unset: the source is asked."""
    digests: dict[Text, Sha256] = {}
    """sha256 of files that are known from elsewhere: whatever the source lists must agree."""
    read_only: bool = True
    replace: bool = False
    """Another revision may take the place of one that rigctl staged."""
    workers: Positive = 8
    bandwidth_limit: Positive | None = None
    reserve_bytes: Count = 1 << 30
    reserve_inodes: Count = 1000
    retries: Count = 8
    backoff: Seconds = 1.0
    stall: Seconds = 60.0

    @model_validator(mode="after")
    def _fields_suit_the_source(self) -> Self:
        if self.token is not None and not isinstance(self.source, HubSource | HttpSource):
            raise ValueError(f"token: a source of kind {self.source.kind} takes none")
        if self.generator_revision is not None and not isinstance(self.source, GeneratorSource):
            raise ValueError(f"generator_revision: a source of kind {self.source.kind} has none")
        return self

    @property
    def revision(self) -> str | None:
        """The revision that must lie at the destination; None where the source has none."""
        return self.source.revision if isinstance(self.source, HubSource) else self.generator_revision
