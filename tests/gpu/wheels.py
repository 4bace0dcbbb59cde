"""What a machine without a network needs to build releases' environments: wheels in portions, and their locks.

python -m tests.gpu.wheels FOLDER OUT RELEASE... [--portion MB]

FOLDER/<release> holds the wheels of a release's lock for Python 3.12 (`pip download --require-hashes`), FOLDER/host
those of hostkit and of the control program, FOLDER/aiperf those of the load generator. OUT gets portions of whole
wheels, p1, p2, ..., each with SHA256SUMS, the first release's before the next one's. With the last of its wheels comes
a lock, `<release>.txt` or `aiperf.txt`, with three differences, which it states at its head. torch and what it brings
come from the machine; what no part of the run imports is left out; and large wheels lose the code of other GPUs and
files that serve nothing.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import re
import shutil
import sys
import zipfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from rig.bench.sweeps import LOCK
from rig.catalog.entries import ROOT, load_catalog
from tests.gpu.fatbin import trimmed_wheel

sys.path.append(str(ROOT / "files/hostkit"))
from rigctl.engines.drift import read_lock  # the path comes first

# Comes with the machine's torch. `torch` itself becomes a wheel that points there.
GIVEN = {
    *("torchvision", "torchaudio", "triton", "cuda-toolkit", "nvidia-cublas", "nvidia-cuda-cupti"),
    *("nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cudnn-cu13", "nvidia-cufft", "nvidia-cufile"),
    *("nvidia-curand", "nvidia-cusolver", "nvidia-cusparse", "nvidia-cusparselt-cu13", "nvidia-nccl-cu13"),
    *("nvidia-nvjitlink", "nvidia-nvshmem-cu13", "nvidia-nvtx"),
}
# Large, and imported by no module that serves Kimi-K2.5 with EAGLE-3 (each was imported without them); the machine's
# own are seen where it has some (numba, pandas, scipy, ...).
LEFT_OUT = {
    *("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-core"),
    *("nvidia-cutlass-dsl-libs-cu12", "nvidia-cutlass-dsl-libs-cu13", "cuda-tile", "flash-attn-4", "quack-kernels"),
    *("nvidia-nvvm", "nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-cuda-cccl", "nvidia-cuda-nvdisasm"),
    *("nvidia-mathdx", "tilelang", "z3-solver", "helion", "humming-kernels", "tokenspeed-triton", "tokenspeed-mla"),
    *("modelscope", "modelscope-hub", "datasets", "smg-grpc-proto", "smg-grpc-servicer", "grpcio"),
    *("grpcio-health-checking", "grpcio-reflection", "py-spy"),
    *("numba", "llvmlite", "pyarrow", "pandas", "scipy", "lxml", "opencv-python-headless", "pynvvideocodec"),
}
# Of the load generator: what the machine has, and what it imports only to draw, to search or in a cluster.
GENERATOR_GIVEN = {"transformers", "tokenizers", "safetensors", "sentencepiece"}
GENERATOR_LEFT_OUT = {
    *("pyarrow", "scipy", "pandas", "matplotlib", "fonttools", "kiwisolver", "contourpy", "seaborn", "soundfile"),
    *("plotly", "dash", "dash-bootstrap-components", "kaleido", "sqlalchemy", "alembic", "optuna", "textual"),
    *("datasets", "kopf", "kubernetes-asyncio"),
}
# Wheels that lose GPU code, and files that no part of the run reads: a library for linking, another front end.
TRIMMED: dict[str, tuple[str, ...]] = {
    "sglang-kernel": (),
    "vllm": ("vllm/vllm-rs",),
    "xgrammar": ("xgrammar/lib/libxgrammar.a",),
}
POINTER = "/etc/kimi-rig-torch"
PORTION_MB = 50
_BLOCK = re.compile(r"(?m)^(?=[a-z0-9])")
_PIN = re.compile(r"([a-z0-9._-]+)==(\S+)")


def distribution(wheel: Path) -> str:
    """The normalised name of a wheel's distribution."""
    return re.sub(r"[-_.]+", "-", wheel.name.split("-")[0]).lower()


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def pointer_wheel(version: str, folder: Path) -> Path:
    """A wheel named torch that adds the machine's packages (POINTER names their directory) behind the environment's."""
    pointer = f"import sys; sys.path.append(open({POINTER!r}).read().strip())\n"
    metadata = f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\nSummary: points to the machine's own torch\n"
    info = f"torch-{version}.dist-info"
    files = {
        "zz_machines_torch.pth": pointer.encode(),
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: kimi-rig\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for name, data in files.items()
    )
    path = folder / f"torch-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in {**files, f"{info}/RECORD": (record + f"{info}/RECORD,,\n").encode()}.items():
            wheel.writestr(zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0)), data)
    return path


def trimmed(source: Path, folder: Path, left_out: Collection[str]) -> tuple[Path, list[str]]:
    """The trimmed wheel and what was done to it; made once, as it takes minutes."""
    target, told = folder / source.name, folder / f"{source.name}.txt"
    if not told.exists():
        said = trimmed_wheel(source, target, left_out=left_out)
        told.write_text("\n".join(said))
    return target, told.read_text().splitlines()


@dataclass(frozen=True)
class Part:
    """One environment of the machine. name: of its lock there; folder: its wheels; lock: the text it is made from."""

    name: str
    folder: str
    lock: str
    given: Collection[str]
    left_out: Collection[str]


def carried(part: Part, folder: Path, made: Path) -> tuple[dict[str, Path], list[str]]:
    """The wheels of an environment that travel, by name, and in words what differs from its lock."""
    pinned = read_lock(part.lock)
    wheels: dict[str, Path] = {}
    changes = [
        f"Made by tests/gpu/wheels.py for a machine that brings torch {pinned['torch']}.",
        f"From the machine: {', '.join(sorted(set(part.given) & pinned.keys()))}.",
        f"Left out: {', '.join(sorted(set(part.left_out) & pinned.keys()))}.",
    ]
    for path in sorted((folder / part.folder).glob("*.whl")):
        name = distribution(path)
        if name not in pinned or name in part.given or name in part.left_out:
            continue
        wheels[name] = path
        if name in TRIMMED:
            wheels[name], said = trimmed(path, made, TRIMMED[name])
            changes += [f"Trimmed: {line}." for line in said]
    return wheels, changes


def derived_lock(lock: str, wheels: dict[str, Path], changes: list[str]) -> str:
    """The lock for the machine: only what is carried; torch and trimmed wheels with the hash of what is carried."""
    kept = []
    for block in _BLOCK.split(lock):
        pin = _PIN.match(block)
        if pin is None or pin[1] not in wheels:
            continue
        ours = pin[1] in TRIMMED or pin[1] == "torch"
        kept.append(f"{pin[1]}=={pin[2]} \\\n    --hash=sha256:{digest(wheels[pin[1]])}\n" if ours else block)
    return "".join(f"# {line}\n" for line in changes) + "".join(kept)


def portions(wheels: list[Path], limit: int) -> list[list[Path]]:
    """Whole wheels in groups of at most `limit` bytes: each in the first group that has room for it."""
    groups: list[list[Path]] = []
    room: list[int] = []
    for wheel in wheels:
        size = wheel.stat().st_size
        place = next((number for number, left in enumerate(room) if left >= size), len(room))
        if place == len(room):
            groups.append([])
            room.append(limit)
        groups[place].append(wheel)
        room[place] -= size
    return groups


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("release", nargs="+")
    parser.add_argument("--portion", type=int, default=PORTION_MB, help="MB")
    arguments = parser.parse_args(argv)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    made = out / "made"
    made.mkdir(exist_ok=True)
    releases = [load_catalog().releases[name] for name in arguments.release]
    locks = [(ROOT / release.lock.format(python="312")).read_text() for release in releases]
    (version,) = {read_lock(lock)["torch"] for lock in locks}
    torch = pointer_wheel(version, made)
    pin = f"torch=={version} \\\n    --hash=sha256:{digest(torch)}\n"
    parts = [
        Part(f"{name}.txt", name, lock, GIVEN, LEFT_OUT) for name, lock in zip(arguments.release, locks, strict=True)
    ]
    parts.append(Part("aiperf.txt", "aiperf", LOCK.read_text() + pin, GENERATOR_GIVEN, GENERATOR_LEFT_OUT))
    chosen = {path.name: path for path in sorted((arguments.folder / "host").glob("*.whl"))}
    travelling: dict[str, set[Path]] = {}
    for part in parts:
        wheels, changes = carried(part, arguments.folder, made)
        wheels["torch"] = torch
        if missing := read_lock(part.lock).keys() - wheels.keys() - {*part.given, *part.left_out}:
            print(f"no wheel in {arguments.folder / part.folder}: {', '.join(sorted(missing))}", file=sys.stderr)
            return 1
        (out / part.name).write_text(derived_lock(part.lock, wheels, changes))
        travelling[part.name] = {*wheels.values()}
        # The small ones last: they fill what the large ones leave.
        chosen |= {
            path.name: path
            for path in sorted(wheels.values(), key=lambda path: -path.stat().st_size)
            if path.name not in chosen
        }
    for old in out.glob("p[0-9]*"):
        shutil.rmtree(old)
    groups = portions([*chosen.values()], arguments.portion * 10**6)
    for name, needed in travelling.items():
        # A lock comes with the last of its wheels: what is there can be built.
        max((group for group in groups if needed & {*group}), key=groups.index).append(out / name)
    for number, group in enumerate(groups, start=1):
        place = out / f"p{number}"
        place.mkdir()
        for file in group:
            shutil.copy(file, place / file.name)
        (place / "SHA256SUMS").write_text("".join(f"{digest(file)}  {file.name}\n" for file in group))
        print(f"{place.name}: {len(group)} files, {sum(file.stat().st_size for file in group) / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
