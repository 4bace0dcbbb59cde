"""A signed apt repository of small packages that are named as NVIDIA's, made without any network."""

from __future__ import annotations

import hashlib
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Package:
    """One package. files: path on the host -> content. scripts: maintainer script -> content."""

    name: str
    version: str
    depends: str = ""
    files: tuple[tuple[str, bytes], ...] = ()
    scripts: tuple[tuple[str, str], ...] = ()


def build(package: Package, folder: Path) -> Path:
    """The .deb file of a package, made in `folder`."""
    root = folder / f"{package.name}_{package.version}"
    (root / "DEBIAN").mkdir(parents=True)
    depends = f"Depends: {package.depends}\n" if package.depends else ""
    (root / "DEBIAN/control").write_text(
        f"Package: {package.name}\nVersion: {package.version}\nArchitecture: all\n"
        f"Maintainer: drill <drill@example.org>\n{depends}Description: stands in for {package.name}\n"
    )
    for name, text in package.scripts:
        (root / "DEBIAN" / name).write_text(text)
        (root / "DEBIAN" / name).chmod(0o755)
    for path, content in package.files:
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    deb = folder / f"{package.name}_{package.version}_all.deb"
    command = ["dpkg-deb", "--root-owner-group", "--build", str(root), str(deb)]
    subprocess.run(command, check=True, capture_output=True)
    return deb


class Repository:
    """A flat repository (deb [signed-by=...] file:/folder ./) with a key of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder.parent / f"{folder.name}-gpg"
        folder.mkdir(parents=True)
        self.home.mkdir(mode=0o700)
        self._gpg("--quick-generate-key", "--passphrase", "", "drill", "rsa2048", "sign", "1d")
        self.key = self._gpg("--export")

    def _gpg(self, *arguments: str) -> bytes:
        command = ["gpg", "--homedir", str(self.home), "--batch", "--yes", "--pinentry-mode", "loopback", *arguments]
        return subprocess.run(command, check=True, capture_output=True).stdout

    def add(self, *packages: Package) -> None:
        """Build packages and sign the index anew."""
        for package in packages:
            build(package, self.folder)
        entries = []
        for deb in sorted(self.folder.glob("*.deb")):
            control = subprocess.run(["dpkg-deb", "-f", str(deb)], check=True, capture_output=True, text=True).stdout
            digest = hashlib.sha256(deb.read_bytes()).hexdigest()
            entries.append(f"{control}Filename: ./{deb.name}\nSize: {deb.stat().st_size}\nSHA256: {digest}\n")
        index = "\n".join(entries).encode()
        (self.folder / "Packages").write_bytes(index)
        digest = hashlib.sha256(index).hexdigest()
        (self.folder / "Release").write_text(f"Origin: drill\nSHA256:\n {digest} {len(index)} Packages\n")
        self._gpg("--clearsign", "-o", str(self.folder / "InRelease"), str(self.folder / "Release"))


def kernel_module(version: str) -> bytes:
    """An ELF file with no code that tells modinfo of a version; no kernel loads it."""
    info = f"version={version}\0license=Dual MIT/GPL\0vermagic=drill\0name=nvidia\0".encode()
    names = b"\0.modinfo\0.shstrtab\0"
    at = 64
    table = at + len(info) + len(names)
    table += -table % 8
    header = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 1, 62, 1, 0, 0, table, 0, 64, 0, 0, 64, 3, 2)
    sections = [
        bytes(64),
        struct.pack("<IIQQQQIIQQ", 1, 1, 2, 0, at, len(info), 0, 0, 1, 0),
        struct.pack("<IIQQQQIIQQ", 10, 3, 0, 0, at + len(info), len(names), 0, 0, 1, 0),
    ]
    body = (header + info + names).ljust(table, b"\0")
    return body + b"".join(sections)
