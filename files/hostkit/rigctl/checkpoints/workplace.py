"""The place beside a destination where a checkpoint grows until it is complete: `.NAME.partial`.

.NAME.partial/owner.json      marks the directory as ours, names the manifest it was begun for
.NAME.partial/parts/          files that are being fetched, resumed inside
.NAME.partial/tree/           files that were proved; becomes the destination by one rename
.NAME.partial/verified.jsonl  what was proved, so that a resumed job does not hash it again
.NAME.partial/record.json     written last before the rename: a crash after it is finished by the next run
"""

import contextlib
import errno
import hashlib
import json
import os
import secrets
import stat
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

from rigctl import lock_files
from rigctl.checkpoints.paths import allocated, inside, make_parents, walk
from rigctl.checkpoints.record import Record, State, parse
from rigctl.checkpoints.verify import Seen, check_file
from rigctl.contract.manifest import File, Manifest, safe_relative
from rigctl.errors import RigctlError
from rigctl.guarded import DIRECTORY, Unsafe, opened, regular, remove
from rigctl.reached import reached
from rigctl.whole_files import read_json, sync_directory, write_json


@contextlib.contextmanager
def locked(state: State, name: str, directory: Path) -> Iterator[None]:
    """One job a destination and a name; raises Busy with who has it."""
    key = hashlib.sha256(os.fsencode(directory)).hexdigest()[:24]
    what = f"a job is running already (follow it with `rigctl checkpoints follow {name}`)"
    with contextlib.ExitStack() as stack:
        for lock in (state.lock_path(f"to-{key}"), state.lock_path(f"name-{name}")):
            # A look by `status` holds the lock for a moment.
            stack.enter_context(lock_files.locked(lock, what, seconds=1.0))
        yield


def is_locked(state: State, name: str) -> bool:
    return lock_files.is_locked(state.lock_path(f"name-{name}"))


class Workplace:
    """The place beside a destination. As a context manager it holds its directory, and that of the destination, open:
    what others can exchange on the way there changes nothing then, and publication goes where was looked.
    """

    def __init__(self, destination: Path) -> None:
        self.destination = destination
        self.shown = self.root = destination.parent / f".{destination.name}.partial"
        self.led: str | None = None
        """What lets others exchange the checkpoint, in words."""
        self._held = contextlib.ExitStack()
        self._beside = self._inside = self._published = -1  # descriptors
        self._lock = threading.Lock()
        self._known: dict[str, tuple[str, Seen]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        held, self.root = str(self.root), self.shown
        self._beside = self._inside = self._published = -1
        self._held.close()
        if isinstance(error, RigctlError):
            error.args = tuple(str(text).replace(held, str(self.shown)) for text in error.args)
        elif isinstance(error, OSError) and error.filename:
            error.filename = str(error.filename).replace(held, str(self.shown))

    @property
    def tree(self) -> Path:
        return self.root / "tree"

    @property
    def parts(self) -> Path:
        return self.root / "parts"

    @property
    def _owner(self) -> Path:
        return self.root / "owner.json"

    @property
    def _journal(self) -> Path:
        return self.root / "verified.jsonl"

    @property
    def _record(self) -> Path:
        return self.root / "record.json"

    def _hold(self, *, make: bool = False) -> bool:
        """Open it; whether it is there and ours. Raises RigctlError where a link of another user's leads there."""
        if self._inside >= 0:
            return True
        try:
            way = self._held.enter_context(reached(self.shown))
        except (FileNotFoundError, NotADirectoryError):
            return False
        if way.links or way.path != str(self.shown):
            raise RigctlError(f"{self.shown} is led elsewhere by a link: {', '.join(way.links) or way.path}")
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(way.name, 0o700, dir_fd=way.directory)
        try:
            inside = opened(way.directory, way.name, str(self.shown), DIRECTORY)
        except (FileNotFoundError, Unsafe):
            return False
        self._held.callback(os.close, inside)
        status = os.fstat(inside)
        # Made with 0700 by every version: whoever else could write in it chooses what we delete and publish.
        if status.st_mode & 0o022 or (status.st_uid != os.geteuid() and status.st_uid != made_as(inside)):
            return False
        if way.shared:
            self.led = ", ".join(f"{path} {why}" for path, why in way.shared.items())
            self.root = Path(f"/proc/{os.getpid()}/fd/{inside}")
        self._beside, self._inside = way.directory, inside
        return True

    def begin(self, manifest: Manifest | None) -> None:
        """Make it, or take it over; files not in `manifest` are dropped. Refuses what is not ours."""
        if not self._hold(make=True) or not (self._owner.is_file() or not os.listdir(self._inside)):  # noqa: PTH208  # of a descriptor
            raise RigctlError(f"{self.shown} exists and is not this program's: move it away, nothing was touched")
        write_json(self._owner, {"owner": "rigctl checkpoints", "identity": manifest and manifest.identity()})
        self.tree.mkdir(exist_ok=True)
        self.parts.mkdir(exist_ok=True)
        self._known = dict(self._proved_before())
        if manifest is not None:
            self._prune(manifest)

    def _proved_before(self) -> Iterator[tuple[str, tuple[str, Seen]]]:
        text = self._journal.read_text(encoding="utf-8") if self._journal.exists() else ""
        for line in text.splitlines():
            # the last line of a killed run may be cut
            with contextlib.suppress(ValueError, KeyError, TypeError):
                item = json.loads(line)
                yield item["path"], (item["digest"], Seen(**item["seen"]))

    def _prune(self, manifest: Manifest) -> None:
        """Drop files of another revision: parts that cannot belong to the manifest, and files not in it."""
        for path, place in list(walk(self.tree)):
            if manifest.by_path.get(path) is None:
                place.unlink()
        wanted = {part_name(entry) for entry in manifest.files}
        for entry in manifest.files:  # where versions before 0.4.0 had rsync put them
            begun = inside(self.root / "incoming", entry.path)
            if begun.is_file() and not begun.is_symlink() and not self.part(entry).exists():
                begun.replace(self.part(entry))
        for path, place in list(walk(self.parts)):
            if place.is_symlink() or path.removesuffix(".validator") not in wanted:
                place.unlink()

    def part(self, entry: File) -> Path:
        """The file an entry grows in; named after its digest: a new revision never continues an old one."""
        return self.parts / part_name(entry)

    def allocated(self, manifest: Manifest) -> int:
        """Bytes of the manifest's files that are on disk already, begun or proved."""
        if not self._hold():
            return 0
        incoming = self.root / "incoming"
        return allocated(
            place
            for entry in manifest.files
            for place in (self.tree / entry.path, self.part(entry), incoming / entry.path)
        )

    def proved(self, entry: File) -> Seen | None:
        """What is known of a file in the tree; one without a journal line is hashed, a wrong one removed."""
        place = inside(self.tree, entry.path)
        if place.is_symlink():
            place.unlink()
        if not place.exists():
            return None
        digest, seen = self._known.get(entry.path, ("", None))
        if digest == entry.digest() and seen == Seen.of(place.stat()):
            return seen
        fault, found = check_file(self.tree, entry)
        if fault is None and found is not None:
            self._note(entry, found)
            return found
        place.unlink()
        return None

    def accept(self, entry: File, part: Path) -> Seen:
        place = make_parents(self.tree, entry.path)
        part.replace(place)
        seen = Seen.of(place.stat())
        self._note(entry, seen)
        return seen

    def _note(self, entry: File, seen: Seen) -> None:
        line = json.dumps({"path": entry.path, "digest": entry.digest(), "seen": asdict(seen)})
        with self._lock:
            self._known[entry.path] = (entry.digest(), seen)
            with self._journal.open("a", encoding="utf-8") as handle:
                handle.write(line + "\n")

    def publish(self, record: Record, *, replace: bool = False) -> None:
        """Give the tree its mode and its final name; without `replace`, nothing is replaced."""
        remove_empty_directories(self.tree)
        settle(self.tree, record.read_only)
        for directory, _, _ in os.walk(self.tree):
            sync_directory(Path(directory))
        write_json(self._record, record.to_json())
        name = self.destination.name
        self._published = opened(self._inside, "tree", str(self.tree), DIRECTORY)
        self._held.callback(os.close, self._published)
        try:
            if replace:
                with self.published() as old:
                    os.fchmod(old, 0o755)
                os.rename(name, "old", src_dir_fd=self._beside, dst_dir_fd=self._inside)
            # an empty directory at the destination is taken over, a full one is an error of rename(2)
            os.rename("tree", name, src_dir_fd=self._inside, dst_dir_fd=self._beside)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise RigctlError(
                    f"{self.destination} appeared while this job ran: it was left alone; "
                    f"the complete checkpoint is in {self.tree}"
                ) from error
            raise RigctlError(f"{self.tree} cannot become {self.destination}: {error.strerror}") from error
        sync_directory(Path(f"/proc/self/fd/{self._beside}"))

    @contextlib.contextmanager
    def published(self) -> Iterator[int]:
        """Descriptor of the directory at the destination. Raises OSError, Unsafe."""
        descriptor = opened(self._beside, self.destination.name, str(self.destination), DIRECTORY)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def close(self, *, read_only: bool) -> None:
        """Take the write bit off the published directory: this run's, or the one that an earlier run published."""
        with self.published() if self._published < 0 else contextlib.nullcontext(self._published) as directory:
            if os.fstat(directory).st_uid == os.fstat(self._inside).st_uid:
                os.fchmod(directory, 0o555 if read_only else 0o755)

    def put(self, path: str) -> Seen:
        """Move a file of the tree to its place in the published directory, whose closed directories stay closed."""
        *parents, name = safe_relative(path).split("/")
        with contextlib.ExitStack() as held:
            directory = held.enter_context(self.published())
            for part in [*parents, ""]:
                mode = stat.S_IMODE(os.fstat(directory).st_mode)
                if not mode & 0o200:
                    os.fchmod(directory, mode | 0o200)
                    held.callback(os.fchmod, directory, mode)
                if part:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, dir_fd=directory)
                    directory = opened(directory, part, f"{self.destination}/{path}", DIRECTORY)
                    held.callback(os.close, directory)
            os.rename(self.tree / path, name, dst_dir_fd=directory)
            return Seen.of(os.stat(name, dir_fd=directory, follow_symlinks=False))

    def unfinished(self) -> Record | None:
        """The record of a publication that a crash cut between the rename and the record, if there is one."""
        if not self._hold() or not self._record.is_file() or self.tree.exists() or not self.destination.is_dir():
            return None
        return parse(read_json(self._record, "record"), str(self._record))

    def remove(self) -> None:
        """Remove the workplace; only ours, only after publication."""
        if not self._hold() or not self._owner.is_file():
            return
        for _, _, _, directory in os.fwalk(dir_fd=self._inside):
            os.fchmod(directory, 0o700)
        remove(self._inside, *os.listdir(self._inside))  # noqa: PTH208  # of a descriptor
        # Somebody may have exchanged the name; what is there then is not ours.
        there = os.stat(self.shown.name, dir_fd=self._beside, follow_symlinks=False)
        if os.path.samestat(there, os.fstat(self._inside)):
            os.rmdir(self.shown.name, dir_fd=self._beside)


def made_as(directory: int) -> int:
    """Who owns what we make there: on a network file system root may be another user (exports(5), root_squash)."""
    name = f".{secrets.token_hex(8)}"
    os.mkdir(name, 0o700, dir_fd=directory)
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False).st_uid
    finally:
        os.rmdir(name, dir_fd=directory)


def part_name(entry: File) -> str:
    path = hashlib.sha256(entry.path.encode()).hexdigest()[:16]
    return f"{entry.digest().partition(':')[2]}-{path}"


def remove_empty_directories(root: Path) -> None:
    for place, _, _ in os.walk(root, topdown=False):
        if Path(place) != root and not any(Path(place).iterdir()):
            Path(place).rmdir()


def settle(root: Path, read_only: bool) -> None:
    """Mode of what we staged: files 0444 or 0644, directories 0555 or 0755.

    The top directory keeps its write bit until it has its name (moving a directory needs it): see `Workplace.close`.
    """
    for place, _, files, directory in os.fwalk(root):
        for name in files:
            with regular(directory, name, f"{place}/{name}") as file:
                os.fchmod(file.fileno(), 0o444 if read_only else 0o644)
        os.fchmod(directory, 0o755 if Path(place) == root or not read_only else 0o555)
