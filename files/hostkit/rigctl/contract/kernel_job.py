"""The order `kernel job`: the CUDA kernel library of one release, /etc/kimi-rig/kernels/<release>.json."""

import hashlib
import json
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator
from typing_extensions import override

from rigctl.contract.environment_build import Environment
from rigctl.contract.fields import Commit, Distribution, Dotted, Package, Place, Remote, Sha256, Text, Variable
from rigctl.contract.order import Document, Order, Part

Below = Annotated[str, StringConstraints(pattern=r"^\w[\w.-]*(/\w[\w.-]*)*$")]
Dependency = Annotated[str, StringConstraints(pattern=r"^\w[\w.-]*$")]


class GitSource(Part):
    """A commit of a git repository. mirror: an address, or a bundle file on the host, that is asked before `url`."""

    kind: Literal["git"]
    url: Remote
    commit: Commit
    mirror: Remote | None = None
    submodules: bool = False


class SourceDirectory(Part):
    """A source tree that is already on the host; it is never changed."""

    kind: Literal["directory"]
    path: Place


class KernelDependency(Part):
    """A directory on the host for a dependency that CMake would fetch (FETCHCONTENT_SOURCE_DIR_<NAME>)."""

    path: Place
    private: bool = False
    """Configuration writes into it: each build gets a copy."""
    nested: dict[Below, Place] = {}
    """Trees that belong inside it and are no part of the directory, as submodules are: where -> directory on the host.
    Each build gets a copy of it with them."""


class KernelLibrary(Part):
    """The CUDA kernel library of a release: that of its lock, proved, or one built for the host's GPUs."""

    mode: Literal["wheel", "source"]
    package: Distribution
    """Name of the distribution."""
    module: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")]
    """Module that is imported for a test before the wheel is installed."""
    libraries: Annotated[list[Text], Field(min_length=1)]
    """Patterns below site-packages: libraries that must hold code for every wanted architecture."""
    source: Annotated[GitSource | SourceDirectory, Field(discriminator="kind")] | None = None
    subdirectory: Annotated[str, StringConstraints(pattern=r"^(\.|\w[\w.-]*(/\w[\w.-]*)*)$")] = "."
    """Where its pyproject.toml is in the source."""
    architectures: list[Annotated[str, StringConstraints(pattern=r"^\d{1,2}\.\d$")]] = []
    """Compute capabilities; none: those of the host's GPUs."""
    minimum_cuda: Dotted = "12.8"
    """Of the toolkit: the first that knows the wanted architectures."""
    defines: dict[Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w-]*$")], str] = {}
    """CMake variables."""
    environment: dict[Variable, str] = {}
    """Variables of the build."""
    drop_targets: list[Text] = []
    """CMake targets that are neither built nor installed."""
    dependencies: dict[Dependency, KernelDependency] = {}
    unused_dependencies: list[Dependency] = []
    """Dependencies that its CMake files declare and these defines do not reach: nobody misses them."""
    system_packages: list[Package] = []
    """Debian/Ubuntu packages with headers and libraries that a build needs."""
    memory_mib: dict[Text, Annotated[int, Field(ge=1)]] = {}
    """Memory that compiling a file takes, by file name or path; "default" for those of which nothing is known. What was
    measured counts when it is larger."""
    jobs: Annotated[int, Field(ge=1)] | None = None
    """Most compilers at once; unset: by memory and cores."""
    memory_limit: Annotated[str, StringConstraints(pattern=r"^([1-9]\d?%|[1-9]\d*[MG])$")] = "85%"
    """Of the build as a whole (systemd's MemoryMax=)."""
    while_serving: Literal["refuse", "share"] = "refuse"
    """Build beside a serving engine: not at all, or with a quarter of the cores."""
    minimum_disk_mib: Annotated[int, Field(ge=0)] = 8192
    shared_wheels: list[Sha256] = []
    """sha256 of wheels that may be taken from kernel_store: of those that a host of the operator's has built
    (`rigctl kernel receipt`). Others that lie there are not used."""

    @model_validator(mode="after")
    def _source_is_named(self) -> Self:
        if self.mode == "source" and self.source is None:
            raise ValueError("mode source needs a source")
        return self


class KernelTools(Part):
    """Environment with the build tools, and its lock. cuda_home: a toolkit that is there; None: that of the lock."""

    path: Place
    lock: Place
    cuda_home: Place | None = None


# Words of the digest that are not those of the order: version 0.1.0 had them in its orders.
RENAMED = {
    "variables": "environment",
    "memory": "memory_mib",
    "minimum_disk": "minimum_disk_mib",
    "shared": "kernel_store",
}
NOT_OF_THE_LIBRARY = ("memory_limit", "unused_dependencies", "shared_wheels")
ENGINE = {"environment": "path", "python": "python", "lock": "lock", "series": "patches"}


class KernelJob(KernelLibrary, Order):
    """What `rigctl kernel` works from: the library and where things are on the host."""

    engine: Environment
    """Environment of the release: the library is built against its torch and installed into it."""
    toolchain: KernelTools
    root: Place
    """Store, work directories and compiler cache."""
    patches: Place | None = None
    """Directory of the patches that are applied to the source."""
    kernel_store: Annotated[str, StringConstraints(pattern=r"^([\w.@-]+:)?/[\w./-]+$")] | None = None
    """A directory, or HOST:DIRECTORY for rsync, from which wheels are fetched and to which they are put."""
    wheels: Place | None = None
    """Directory that has every wheel of the toolchain's lock; no index is asked then."""

    @override
    def document(self) -> Document:
        """Without `shared_wheels` where there are none: most hosts have an order without that key, and keep it."""
        whole = super().document()
        return whole if self.shared_wheels else {key: value for key, value in whole.items() if key != "shared_wheels"}

    @property
    def digest(self) -> str:
        """Of what is ordered, whatever words the format has for it.

        Receipts, recorded states and names of build units hold it, and another one means hours of building: it is
        taken over the words of version 0.1.0 for ever. What was added later counts once it is set; NOT_OF_THE_LIBRARY
        says nothing of it.
        """
        now = self.model_dump(mode="json", exclude={"format", "engine", *NOT_OF_THE_LIBRARY})
        for holder, key in ((now, "system_packages"), *((each, "nested") for each in now["dependencies"].values())):
            if not holder[key]:
                del holder[key]
        engine = self.engine.model_dump(mode="json")
        old = {
            **{key: value for key, value in now.items() if key not in RENAMED.values()},
            **{key: now[new] for key, new in RENAMED.items()},
            **{key: engine[new] for key, new in ENGINE.items()},
            "name": self.package,
        }
        return hashlib.sha256(json.dumps(old, sort_keys=True).encode()).hexdigest()
