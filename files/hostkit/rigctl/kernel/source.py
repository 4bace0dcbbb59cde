"""Source trees: their digest, a private copy, a commit of a git repository. No file of the operator's is changed."""

import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rigctl import builder
from rigctl.contract.kernel_job import GitSource, KernelJob, SourceDirectory
from rigctl.errors import RigctlError
from rigctl.whole_files import read_object, write_json

PATCHED = ".kimi-rig-patched"
"""File in a private copy to which all patches are applied."""
# What version control and tools leave in a tree; no compiler reads it.
IGNORED = {".git", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"}


def files(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Files and links below `root`, in order, as (relative path, status). Raises RigctlError for pipes and the like."""
    pending = [""]
    while pending:
        prefix = pending.pop()
        with os.scandir(root / prefix) as entries:
            listed = sorted(entries, key=lambda each: each.name)
        for entry in listed:
            if entry.name in IGNORED:
                continue
            if entry.is_dir(follow_symlinks=False):
                pending.append(f"{prefix}{entry.name}/")
                continue
            status = entry.stat(follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode) and not stat.S_ISLNK(status.st_mode):
                raise RigctlError(f"{entry.path} is neither file, directory nor link: take it out of the source")
            yield prefix + entry.name, status


def outside(link: Path, root: Path) -> Path | None:
    """Where a link of a tree leads out of it. None: it stays in it, leads nowhere, or to what holds the tree."""
    target, top = Path(os.path.realpath(link)), Path(os.path.realpath(root))  # links may go in circles
    apart = not target.is_relative_to(top) and not top.is_relative_to(target)
    return target if link.is_symlink() and apart and target.exists() else None


def tree_digest(root: Path, memo: Path | None = None, above: tuple[Path, ...] = ()) -> str:
    """sha256 over names and content, also of what links out of the tree lead to.

    memo: a file that spares the reading while no size, time or inode has changed; of no use with such links. above:
    the trees whose links led here. Raises RigctlError for a directory that is not there.
    """
    if not root.is_dir():
        raise RigctlError(f"{root}: no such directory")
    stamp = hashlib.sha256()
    listed = sorted(files(root), key=lambda each: each[0])
    for path, status in listed:
        # The time of change as well: who unpacks or edits a file may set the other one.
        times = f"{status.st_mtime_ns}\0{status.st_ctime_ns}"
        stamp.update(os.fsencode(f"{path}\0{status.st_size}\0{times}\0{status.st_ino}\0"))
        if stat.S_ISLNK(status.st_mode) and outside(root / path, root):
            memo = None
    remembered = (read_object(memo) if memo else None) or {}
    if remembered.get("root") == str(root) and remembered.get("stamp") == stamp.hexdigest():
        return str(remembered["digest"])
    digest = hashlib.sha256()
    for path, _ in listed:
        digest.update(os.fsencode(f"{path}\0{_content(root / path, root, (*above, root))}\0"))
    if memo is not None:
        write_json(memo, {"root": str(root), "stamp": stamp.hexdigest(), "digest": digest.hexdigest()}, durable=False)
    return digest.hexdigest()


def _content(path: Path, root: Path, above: tuple[Path, ...]) -> str:
    if (target := outside(path, root)) and target not in above:
        return tree_digest(target, None, above) if target.is_dir() else _content(target, root, above)
    if path.is_symlink():
        return f"-> {path.readlink()}"
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def copy(origin: Path, target: Path, nested: Mapping[str, Path] | None = None) -> None:
    """A copy with times and links, without what version control keeps, which its owner can write; whole or not at all.

    nested: further trees, by their place in it.
    """
    scratch = target.with_name(f".{target.name}.half")
    remove(scratch)
    scratch.parent.mkdir(parents=True, exist_ok=True)
    try:
        for place, tree in {".": origin, **(nested or {})}.items():
            ignore = shutil.ignore_patterns(*IGNORED)
            if (scratch / place).is_symlink():
                (scratch / place).unlink()  # to what the nested tree takes the place of
            shutil.copytree(tree, scratch / place, symlinks=True, ignore=ignore, dirs_exist_ok=True)
            _own(scratch / place, tree)
    except (OSError, shutil.Error) as error:
        remove(scratch)
        why = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror
        raise RigctlError(f"{origin} could not be copied to {target}: {why}") from None
    scratch.rename(target)


def remove(tree: Path) -> None:
    """Delete a directory of ours, also one whose copied directories are read-only."""
    for folder, _, _ in os.walk(tree):
        Path(folder).chmod(stat.S_IRWXU)
    if tree.exists():
        shutil.rmtree(tree)


def _own(tree: Path, origin: Path) -> None:
    """Patches, configuration and a removal write into a copy; links out of the origin lead to the same from there."""
    for folder, _, names in os.walk(tree):
        Path(folder).chmod(Path(folder).stat().st_mode | stat.S_IRWXU)
        for path in (Path(folder, each) for each in names):
            if not path.is_symlink():
                path.chmod(path.stat().st_mode | stat.S_IRUSR | stat.S_IWUSR)
    for name, status in files(tree):
        if stat.S_ISLNK(status.st_mode) and (target := outside(origin / name, origin)):
            (tree / name).unlink()
            (tree / name).symlink_to(target)


def identity(job: KernelJob, memos: Path) -> str:
    """What names the source: the commit, or the tree's digest."""
    source = _source(job)
    if isinstance(source, GitSource):
        return f"git:{source.commit}"
    return f"tree:{tree_digest(source.path, memos / 'source.json')}"


def take(job: KernelJob, target: Path, wanted: str, memos: Path) -> None:
    """A private copy of the source at `target`. wanted: its `identity`. Raises RigctlError when it became another."""
    if target.exists():
        return
    source = _source(job)
    if isinstance(source, GitSource):
        checkout(source, target)
        return
    copy(source.path, target)
    if (found := identity(job, memos)) != wanted:
        remove(target)
        raise RigctlError(
            f"{source.path} was edited while it was copied ({found[:17]} is not {wanted[:17]}); deploy again"
        )


def _source(job: KernelJob) -> GitSource | SourceDirectory:
    if job.source is None:
        raise RigctlError(f"{job.package}: no source")
    return job.source


# git: a server gives a commit by its sha to a shallow fetch; a bundle or an old server gives whole references only.


def checkout(source: GitSource, target: Path) -> None:
    scratch = target.with_name(f".{target.name}.half")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    _git("made", scratch, "init", "--quiet")
    places = [place for place in (source.mirror, source.url) if place]
    said: list[str] = []
    for place in places:
        if (why := _fetch(scratch, place, source.commit)) is None:
            break
        said.append(why)
    else:
        shutil.rmtree(scratch)
        reasons = "; ".join(f"{place}: {why}" for place, why in zip(places, said, strict=True))
        raise RigctlError(
            f"commit {source.commit} could not be fetched ({reasons}): correct the kernel's commit or url, or name a "
            "mirror or a bundle file on the host"
        )
    _git("checked out", scratch, "checkout", "--quiet", "--detach", source.commit)
    if source.submodules:
        local = ["-c", "protocol.file.allow=always"] if source.url.startswith("/") else []
        update = ["submodule", "--quiet", "update", "--init", "--recursive", "--depth", "1"]
        _git("completed with its submodules", scratch, *local, *update)
    scratch.rename(target)


def _fetch(repository: Path, place: str, commit: str) -> str | None:
    """None when the commit is there; else why not."""
    first = _try_git(repository, "fetch", "--quiet", "--depth", "1", place, commit)
    if first.returncode != 0:
        _try_git(repository, "fetch", "--quiet", "--tags", place, "+refs/*:refs/kimi-rig/*")
    if _try_git(repository, "cat-file", "-e", f"{commit}^{{commit}}").returncode == 0:
        return None
    return _last(first.stderr) or "there is no such commit"


def apply_patches(series: Path, root: Path) -> None:
    """Apply a directory of patches to a private copy, once. Raises RigctlError with git's words."""
    done = root / PATCHED
    if done.exists():
        return
    for patch in sorted(series.glob("*.patch")):
        applied = _try_git(root, "apply", "--whitespace=nowarn", str(patch))
        if applied.returncode != 0:
            raise RigctlError(f"{patch.name} does not apply to the source: {_last(applied.stderr)}")
    done.touch()


def _git(what: str, repository: Path, *arguments: str) -> None:
    done = _try_git(repository, *arguments)
    if done.returncode != 0:
        raise RigctlError(
            f"{repository} could not be {what}: {_last(done.stderr) or f'git ended with {done.returncode}'}; mend the "
            "cause (network, disk, the kernel's url or commit) and deploy again"
        )


def _try_git(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # No question is asked; the system's settings (/etc/gitconfig) hold. A work tree above ours does not.
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_CEILING_DIRECTORIES": str(repository.parent)}
    with tempfile.NamedTemporaryFile("w", suffix=".gitconfig") as settings:
        # A repository of another user on this host is served by a git of ours, which has nothing to lose.
        settings.write("[safe]\n\tdirectory = *\n")
        settings.flush()
        return _run(["git", "-C", str(repository), *arguments], {**environment, "GIT_CONFIG_GLOBAL": settings.name})


def _run(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    builder.inside()
    try:
        return subprocess.run(command, env=environment, capture_output=True, errors="replace", check=False)
    except FileNotFoundError:
        raise RigctlError("git is not installed on this host: install it and deploy again") from None


def _last(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line]
    return lines[-1] if lines else ""
