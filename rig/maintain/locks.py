"""`kimi-rig locks`: make the engines' lock files from files/locks/recipes.yaml."""

import datetime
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import yaml

from rig.cli.arguments import verb
from rigctl.errors import RigctlError

LOCKS = Path(__file__).resolve().parents[2] / "files" / "locks"


class LockError(RigctlError):
    """A recipe that is wrong or cannot be resolved; the message names it."""


@dataclass(frozen=True)
class Recipe:
    """What is locked for one release, for one Python ("3.11") and one platform (uv's name for it)."""

    release: str
    python: str
    platform: str
    packages: tuple[str, ...]
    until: datetime.date | None = None
    overrides: tuple[str, ...] = field(default=())
    index: Mapping[str, Any] | None = None
    """Where packages come from that the default index lacks: {"url", "packages"}."""

    @property
    def file_name(self) -> str:
        return f"{self.release}-cp{self.python.replace('.', '')}.txt"

    def command(self, output: Path, overrides: Path, upgrade: bool) -> list[str]:
        """The `uv pip compile` command; packages go to its standard input."""
        command = ["uv", "pip", "compile", "--quiet", "-", "--generate-hashes", "--only-binary", ":all:"]
        command += ["--python-version", self.python, "--python-platform", self.platform]
        command += ["--no-emit-index-url", "--no-emit-find-links", "--custom-compile-command", "make lock"]
        command += ["--output-file", str(output)]
        if self.until:
            command += ["--exclude-newer", f"{self.until.isoformat()}T00:00:00Z"]
        if self.overrides:
            command += ["--override", str(overrides)]
        if self.index and not self.wheel_directories:
            command += ["--extra-index-url", self.index["url"], "--index-strategy", "unsafe-best-match"]
        return command + ["--upgrade"] * upgrade

    @property
    def wheel_directories(self) -> str:
        """The machine's own (UV_FIND_LINKS), where they hold what the index is named for; its bytes are the same."""
        named = os.environ.get("UV_FIND_LINKS", "")
        names = [path.name for word in re.split(r"[\s,]+", named) if word for path in Path(word).glob("*.whl")]
        wanted = [package.replace("-", "_") for package in (self.index or {}).get("packages", ())]
        return named if wanted and all(any(n.startswith(f"{w}-") for n in names) for w in wanted) else ""


RELEASE_KEYS = {"packages", "until", "overrides", "python", "index"}


def read_recipes(path: Path = LOCKS / "recipes.yaml") -> list[Recipe]:
    """All recipes, one a release and Python; `LockError` names the entry with an unknown or missing key."""
    data: dict[str, Any] = yaml.safe_load(path.read_text())
    recipes = []
    for release, entry in data["releases"].items():
        if unknown := set(entry) - RELEASE_KEYS:
            raise LockError(f"{path.name}: {release}: unknown key {', '.join(sorted(unknown))}")
        if not entry.get("packages"):
            raise LockError(f"{path.name}: {release}: no packages")
        recipes += [
            Recipe(
                release=release,
                python=python,
                platform=data["platform"],
                packages=tuple(entry["packages"]),
                until=entry.get("until"),
                overrides=tuple(entry.get("overrides", ())),
                index=entry.get("index"),
            )
            for python in entry.get("python", data["python"])
        ]
    return recipes


def write_lock(recipe: Recipe, folder: Path = LOCKS, upgrade: bool = False) -> Path:
    """Resolve one recipe; the file in `folder` is replaced only when uv succeeded."""
    target = folder / recipe.file_name
    with tempfile.TemporaryDirectory(dir=folder, prefix=".lock-") as scratch:
        output, overrides = Path(scratch, recipe.file_name), Path(scratch, "overrides.txt")
        overrides.write_text("".join(f"{line}\n" for line in recipe.overrides))
        if target.exists():
            output.write_bytes(target.read_bytes())
        # A machine's own wheel directories must not decide what is locked, beyond what no index of theirs has.
        environment = {name: value for name, value in os.environ.items() if name != "UV_FIND_LINKS"}
        if recipe.wheel_directories:
            environment["UV_FIND_LINKS"] = recipe.wheel_directories
        done = subprocess.run(
            recipe.command(output, overrides, upgrade),
            input="".join(f"{package}\n" for package in recipe.packages),
            env=environment,
            errors="replace",
            capture_output=True,
            check=False,
        )
        if done.returncode:
            raise LockError(f"{recipe.file_name}: not resolved, the old file is kept:\n{done.stderr.strip()}")
        output.replace(target)
    return target


@verb("locks")
@click.argument("releases", nargs=-1, metavar="[RELEASE]...")
@click.option("--recipes", "path", type=Path, default=LOCKS / "recipes.yaml", help="Locks lie beside it.")
@click.option("--upgrade", is_flag=True, help="Forget the versions of the present files.")
def locks_command(releases: Sequence[str], path: Path, *, upgrade: bool) -> None:
    """Make the lock files of RELEASE (default: all) from their recipes: one platform, wheels only, every hash.

    An existing lock's versions are kept where they still fit.
    """
    recipes = read_recipes(path)
    if unknown := set(releases) - {recipe.release for recipe in recipes}:
        raise LockError(f"{path} has no release {', '.join(sorted(unknown))}")
    for recipe in recipes:
        if not releases or recipe.release in releases:
            print(write_lock(recipe, path.parent, upgrade).name)
