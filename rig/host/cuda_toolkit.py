"""Which CUDA toolkit an engine compiles with at serve time. Pure."""

from collections.abc import Mapping

from rig.catalog.entries import Release
from rigctl.contract.comparison import version_tuple

BUILD = (12, 8)
"""The first nvcc that knows SM120: below it sgl-kernel's CMakeLists.txt leaves sm_120a out."""
SERVE = (12, 9)
"""From here on FlashInfer compiles for SM120 (vllm-project/vllm#50705, flashinfer-ai/flashinfer#3633)."""


def suits(version: tuple[int, ...] | None, release: Release) -> bool:
    """Whether a toolkit can compile for a release at serve time: new enough, and of its CUDA's major version.

    nvcc and the CUDA headers of the wheels must match (flashinfer-ai/flashinfer#3493).
    """
    wanted = max(version_tuple(release.minimum_cuda), SERVE)
    return version is not None and version >= wanted and version[0] == wanted[0]


def toolkit_for(
    release: Release, toolkits: Mapping[str, tuple[int, ...] | None], named: str | None, *, carries_nvcc: bool
) -> str | None:
    """The value of CUDA_HOME for a release: the operator's, else the newest on the host that suits, else None.

    toolkits: folder -> version. carries_nvcc: the release's lock has a compiler of its own, which is then used.
    """
    if release.accelerator != "cuda" or named is not None or carries_nvcc:
        return named if release.accelerator == "cuda" else None
    fitting = {home: version for home, version in toolkits.items() if suits(version, release)}
    return max(fitting, key=lambda home: (fitting[home] or (), home), default=None)
