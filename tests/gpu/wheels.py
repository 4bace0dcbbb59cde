"""What a machine without a network needs to build one release's environment: wheels in portions, and their lock.

python -m tests.gpu.wheels RELEASE FOLDER OUT [--portion MB]

FOLDER holds the wheels of the release's lock for Python 3.12 (`pip download --require-hashes`), of hostkit's and of the
control program's. OUT gets portions of whole wheels, p1, p2, ..., each with SHA256SUMS, and `lock.txt`: the release's
lock with three differences, which it states at its head. torch and what it brings come from the machine; what no part
of the run imports is left out; and large wheels lose the code of other GPUs.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import re
import shutil
import sys
import zipfile
from pathlib import Path

from rig.catalog import ROOT, load_catalog
from tests.gpu.fatbin import trimmed_wheel

sys.path.append(str(ROOT / "files/hostkit"))
from rigctl.drift import read_lock  # the path comes first

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
    *("numba", "llvmlite", "pyarrow", "pandas", "scipy", "lxml"),
}
TRIMMED = {"sglang-kernel"}
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


def trimmed(source: Path, folder: Path) -> tuple[Path, list[str]]:
    """The trimmed wheel and what was done to it; made once, as it takes minutes."""
    target, told = folder / source.name, folder / f"{source.name}.txt"
    if not told.exists():
        said = trimmed_wheel(source, target)
        told.write_text("\n".join(said))
    return target, told.read_text().splitlines()


def derived_lock(lock: str, wheels: dict[str, Path], changes: list[str]) -> str:
    """The lock for the machine: only what is carried; torch and trimmed wheels with the hash of what is carried."""
    kept = []
    for block in _BLOCK.split(lock):
        pin = _PIN.match(block)
        if pin is None or pin[1] not in wheels:
            continue
        if pin[1] in TRIMMED or pin[1] == "torch":
            block = f"{pin[1]}=={pin[2]} \\\n    --hash=sha256:{digest(wheels[pin[1]])}\n"  # noqa: PLW2901
        kept.append(block)
    return "".join(f"# {line}\n" for line in changes) + "".join(kept)


def portions(wheels: list[Path], limit: int) -> list[list[Path]]:
    """Whole wheels in groups of at most `limit` bytes, in order."""
    groups: list[list[Path]] = []
    used = 0
    for wheel in wheels:
        size = wheel.stat().st_size
        if not groups or used + size > limit:
            groups.append([])
            used = 0
        groups[-1].append(wheel)
        used += size
    return groups


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("release")
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--portion", type=int, default=PORTION_MB, help="MB")
    arguments = parser.parse_args(argv)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    release = load_catalog().releases[arguments.release]
    lock = (ROOT / release.lock.format(python="312")).read_text()
    pinned = read_lock(lock)
    made = out / "made"
    made.mkdir(exist_ok=True)
    wheels: dict[str, Path] = {"torch": pointer_wheel(pinned["torch"], made)}
    changes = [
        f"Made from {release.lock} by tests/gpu/wheels.py for a machine that brings torch {pinned['torch']}.",
        f"From the machine: {', '.join(sorted(GIVEN & pinned.keys()))}.",
        f"Left out: {', '.join(sorted(LEFT_OUT & pinned.keys()))}.",
    ]
    for path in sorted((arguments.folder / "engine").glob("*.whl")):
        name = distribution(path)
        if name not in pinned or name in GIVEN | LEFT_OUT:
            continue
        if name in TRIMMED:
            path, said = trimmed(path, made)  # noqa: PLW2901
            changes += [f"Trimmed: {line}." for line in said]
        wheels[name] = path
    missing = pinned.keys() - wheels.keys() - GIVEN - LEFT_OUT
    if missing:
        print(f"no wheel in {arguments.folder}/engine: {', '.join(sorted(missing))}", file=sys.stderr)
        return 1
    (out / "lock.txt").write_text(derived_lock(lock, wheels, changes))
    first = sorted((arguments.folder / "host").glob("*.whl"))
    rest = sorted(wheels.values(), key=lambda path: path.stat().st_size)
    for old in out.glob("p[0-9]*"):
        shutil.rmtree(old)
    for number, group in enumerate(portions([*first, *rest], arguments.portion * 10**6), start=1):
        place = out / f"p{number}"
        place.mkdir()
        for wheel in group:
            shutil.copy(wheel, place / wheel.name)
        if number == 1:
            group.append(out / "lock.txt")
            shutil.copy(out / "lock.txt", place)
        (place / "SHA256SUMS").write_text("".join(f"{digest(file)}  {file.name}\n" for file in group))
        print(f"{place.name}: {len(group)} files, {sum(wheel.stat().st_size for wheel in group) / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
