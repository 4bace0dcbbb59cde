"""Bring a checkpoint to its destination: complete and proved, or not there under its final name."""

import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from rigctl.checkpoints import structure, verify
from rigctl.checkpoints.http import GaveUp, HttpFetcher, Refused, UnansweredError
from rigctl.checkpoints.paths import remove_tree
from rigctl.checkpoints.progress import Progress, human_bytes, human_seconds
from rigctl.checkpoints.record import Record, State, extra_beside, fault, quick_report
from rigctl.checkpoints.sink import DiskFull, Limiter, Sink, SourceWrong, disk_error
from rigctl.checkpoints.sources import FileSource, Generator, open_source
from rigctl.checkpoints.verify import Cancelled, FileHasher, Report, Seen
from rigctl.checkpoints.workplace import Workplace, locked, settle
from rigctl.contract.checkpoint_job import CheckpointJob
from rigctl.contract.manifest import File, Manifest
from rigctl.contract.sources import DirectorySource, HubSource, LocalSource
from rigctl.errors import RigctlError
from rigctl.reached import reached

PROBE_FROM = 16 << 30  # bytes; less is there soon, and what the probe fetches must not count


class WrongBytes(RigctlError):
    """The source sends other bytes than the manifest's digest, twice."""


@dataclass(frozen=True)
class Plan:
    """What a job will do, in bytes and seconds, before it moves any."""

    name: str
    destination: str
    source: str
    revision: str | None
    bytes_total: int
    bytes_here: int
    files: int
    free: int
    inodes_free: int | None
    rate: float | None
    seconds: float | None

    @property
    def bytes_needed(self) -> int:
        return self.bytes_total - self.bytes_here

    def line(self) -> str:
        pace = f"{human_bytes(self.rate)}/s" if self.rate else "not measured"
        return (
            f"{self.name}: {self.files} files, {human_bytes(self.bytes_total)} from {self.source}"
            f"{f' at {self.revision}' if self.revision else ''}; {human_bytes(self.bytes_here)} are here, "
            f"{human_bytes(self.bytes_needed)} to fetch, {human_bytes(self.free)} free; "
            f"rate {pace}, about {human_seconds(self.seconds)}"
        )


@dataclass(frozen=True)
class Outcome:
    """How a job ended. `state`: staged, adopted, present (nothing to do) or repaired."""

    state: str
    changed: bool
    record: Record


class Job:
    """One run of staging, adoption or repair for one order; `stop` ends it within a block."""

    def __init__(self, order: CheckpointJob, state: State, progress: Progress, stop: threading.Event) -> None:
        self.order = order
        self.state = state
        self.progress = progress
        self.stop = stop
        # A link stays a link, the directory it leads to is filled; not one that leads where its maker cannot write.
        self._misled: str | None = None
        try:
            with reached(order.destination) as way:
                self.destination = Path(way.path)
                if way.links and os.fstat(way.directory).st_uid not in way.owners:
                    self._misled = way.links[0]
        except FileNotFoundError:
            self.destination = Path(order.destination)
        except OSError as error:
            raise RigctlError(f"{order.destination} cannot be resolved: {error}") from error
        self.workplace = Workplace(self.destination)
        self._limiter = Limiter(order.bandwidth_limit)
        self._line_is_down = threading.Event()
        self._replaces = False
        self._digests_from: str | None = "files"
        self._read = partial(progress.advance, fetched=False)

    @cached_property
    def source(self) -> FileSource | Generator:
        return open_source(self.order, self.progress, self.stop)

    # -- staging -------------------------------------------------------------------------------------------

    def stage(self) -> Outcome:
        """Stage, adopt or confirm; see docs/reference/checkpoints.md for what happens to a directory that is there."""
        with locked(self.state, self.order.name, self.destination), self.workplace:
            self._finish_publication()
            known = self._known()
            if known is not None:
                return known
            if not self._replaces and self._occupied():
                return self._take_what_is_there()
            return self._fetch_and_publish()

    def _finish_publication(self) -> None:
        record = self.workplace.unfinished()
        if record is None:
            return
        report = verify.quick(self.destination, record.manifest, record.seen)
        if not (report.damaged or report.missing):
            self.workplace.close(read_only=record.read_only)
            self.state.save(record)
            self.workplace.remove()
            self.progress.event("the publication of an earlier run was finished")

    def _known(self) -> Outcome | None:
        """The recorded checkpoint, if it is what the spec wants and still as it was proved."""
        record = self.state.load(self.order.name)
        if record is None or not self.destination.exists():
            return None
        if Path(record.path) != self.destination:
            self.progress.event(f"recorded at {record.path} until now, where its files stay")
            return None
        wanted = self._wanted_instead(record)
        if wanted is not None:
            if self.order.replace and record.origin == "staged":
                self._replaces = True
                return None
            raise RigctlError(
                f"{self.destination} holds {record.manifest.revision or 'another content'}, the spec wants "
                f"{wanted}: give the new revision another directory, set replace (what was staged by this "
                "program only), or move the old one away and forget it; nothing was touched"
            )
        report = quick_report(record)
        if not report.complete:
            raise RigctlError(fault(record, report))
        self._unless_a_mirror_vouched(record)
        self.progress.total = self.progress.done = record.manifest.total
        return Outcome("present", False, record)

    def _unless_a_mirror_vouched(self, record: Record) -> None:
        """Compare a record of version 0.2.0 or older with the endpoint, or the pinned manifest: a mirror may have told
        its digests. Raises RigctlError where they differ, or nobody can be asked."""
        mirror = isinstance(self.order.source, HubSource) and self.order.source.mirror
        if not mirror or record.digests_from is not None or record.manifest.revision is None:
            return
        manifest = self.manifest()
        apart = record.manifest.differing(manifest) if manifest is not None else []
        wrong = apart and verify.full(self.destination, selection(apart), advance=self._read, stop=self.stop)
        if wrong and not wrong.complete:
            raise RigctlError(
                f"{self.destination} was proved by digests that its mirror {mirror} told, and they are wrong:\n  "
                + "\n  ".join(wrong.lines()[:20])
                + f"\nmove it away, `rigctl checkpoints forget {record.name}`, and deploy again"
            )
        if manifest is not None:
            record.manifest, record.digests_from = manifest, self._digests_from
            self.state.save(record)
            self.progress.event("its digests are those of its endpoint")

    def _wanted_instead(self, record: Record) -> str | None:
        """What the spec wants, if that is not what the record has."""
        wanted = self._pinned()
        if wanted is not None and not wanted.describes(record.manifest):
            return wanted.revision or "another content"
        if record.origin == "adopted" and record.manifest.revision is None:
            return None  # taken as it lay, without a source to compare with
        return self.order.revision if self.order.revision != record.manifest.revision else None

    def _pinned(self) -> Manifest | None:
        """The pinned manifest's part that the entry wants."""
        if self.order.manifest is None:
            return None
        manifest = Manifest.read(Path(self.order.manifest))
        if self.order.revision not in (None, manifest.revision):
            raise RigctlError(
                f"{self.order.manifest} is of revision {manifest.revision}, the spec pins {self.order.revision}: "
                "pin again to write the right manifest"
            )
        return manifest.wanted(self.order.source, self.order.digests)

    def manifest(self, source: FileSource | Generator | None = None) -> Manifest | None:
        """The pinned manifest, or what the source lists; None where only the finished files tell."""
        if (pinned := self._pinned()) is not None:
            self._digests_from = "manifest"
            return pinned
        listed = (source or self.source).listing()
        self._digests_from = "source" if listed is not None else "files"
        return listed.wanted(self.order.source, self.order.digests) if listed is not None else None

    def _occupied(self) -> bool:
        """Whether the destination holds anything that is not ours to replace."""
        place = self.destination
        if not place.exists():
            if place.is_symlink():
                raise RigctlError(f"{place} is a link to itself")
            if not place.parent.is_dir():
                raise RigctlError(f"{place.parent} does not exist: make it (or mount it) first")
            return False
        if not place.is_dir():
            raise RigctlError(f"{place} is a file, not a directory: move it away, nothing was touched")
        if os.path.ismount(place):
            raise RigctlError(f"{place} is a mount point, it cannot be replaced whole: choose a directory in it")
        return any(place.iterdir())

    def _take_what_is_there(self) -> Outcome:
        source = self.order.source
        # A directory that is its own source is adopted too: nothing can be copied onto itself.
        is_itself = isinstance(source, LocalSource) and Path(source.path).resolve() == self.destination
        if is_itself or isinstance(source, DirectorySource):
            return self._adopt_as_it_is()
        # Adopting needs no line: the client's own retries (half a minute) are patience enough.
        hasty = self.order.model_copy(update={"retries": 0})
        try:
            manifest = self.manifest(open_source(hasty, self.progress, self.stop))
        except (UnansweredError, Refused) as error:
            return self._take_uncompared(error)
        if manifest is None:
            # Only what is generated anew tells whether this is it.
            self._begin(None)
            manifest, _ = self._fetch(None)
            self.workplace.remove()
        sizes = verify.quick(self.destination, manifest, None)
        if sizes.damaged or sizes.missing:
            raise half_copied(self.destination, manifest, sizes)
        return self._adopt_proved(manifest)

    def _take_uncompared(self, why: RigctlError) -> Outcome:
        """Adopt what is loadable by its own headers, index and code files when nobody tells what it shall be."""
        faults = structure.check(self.destination, self.order.role).errors
        faults += differing(self.destination, self.order.digests)
        if faults:
            raise RigctlError(
                f"{self.destination} exists, was not made by this program, and cannot be loaded as it is:\n  "
                + "\n  ".join(faults[:10])
                + f"\nNothing in it was touched, and its source does not tell what it shall be ({why}). Move it "
                "away, or complete it with `rigctl checkpoints repair --in-place` once the source answers."
            )
        self.progress.event(f"taken as it lies, not compared with its source: {why}")
        return self._adopt_as_it_is()

    def adopt(self) -> Outcome:
        """Adopt what is at the destination: against its manifest, or, where it has none, by making one."""
        if not self.destination.is_dir():
            raise RigctlError(f"{self.destination} does not exist: stage it instead")
        with locked(self.state, self.order.name, self.destination):
            pinned = self.order.manifest is not None
            manifest = self.manifest() if pinned else None
            return self._adopt_as_it_is() if manifest is None else self._adopt_proved(manifest)

    def _adopt_proved(self, manifest: Manifest) -> Outcome:
        report = self._verified(manifest)
        if report.damaged or report.missing:
            raise half_copied(self.destination, manifest, report)
        return self._adopted(manifest, report)

    def _adopt_as_it_is(self) -> Outcome:
        """Adopt a directory that nothing but itself describes, such as one's own training output."""
        started = time.monotonic()
        self.progress.phase = "verify"
        name = f"adopted:{self.destination}"
        made, seen = verify.manifest_of(self.destination, name, self.order.source.selects, advance=self._read)
        self.progress.total = made.total
        report = Report(len(seen), made.total, time.monotonic() - started, seen=seen)
        return self._adopted(made, report)

    def _verified(self, manifest: Manifest) -> Report:
        self.progress.phase, self.progress.total = "verify", manifest.total
        return verify.full(self.destination, manifest, advance=self._read, stop=self.stop)

    def _record(self, origin: str, manifest: Manifest, report: Report) -> Record:
        return Record(
            name=self.order.name,
            path=str(self.destination),
            origin=origin,
            manifest=manifest,
            seen=report.seen,
            verified_at=time.time(),
            verified_seconds=round(report.seconds, 3),
            kind=self.order.role,
            read_only=origin == "staged" and self.order.read_only,
            digests_from=self._digests_from,
        )

    def _unless_unusable(self, manifest: Manifest) -> None:
        """Raise RigctlError unless an engine can load what lies at the destination, and would load nothing else."""
        if extra := verify.extra_weights(self.destination, manifest):
            raise extra_beside(self.destination, extra)
        if faults := structure.check(self.destination, self.order.role).errors:
            raise RigctlError(
                f"{self.destination} is not a loadable checkpoint:\n  "
                + "\n  ".join(faults[:20])
                + "\nit was not taken: complete it or copy it again, then deploy again"
            )

    def _adopted(self, manifest: Manifest, report: Report) -> Outcome:
        """Record what lies at the destination, which stays exactly as it is."""
        self._unless_unusable(manifest)
        return Outcome("adopted", True, self._saved("adopted", manifest, report))

    def _saved(self, origin: str, manifest: Manifest, report: Report) -> Record:
        record = self._record(origin, manifest, report)
        record.foreign = verify.foreign_files(self.destination, manifest)
        self.state.save(record)
        return record

    # -- fetching ------------------------------------------------------------------------------------------

    def plan(self, manifest: Manifest, probe: bool = True) -> Plan:
        """Bytes, space and time of what is still to do."""
        here = self.workplace.allocated(manifest)
        free, inodes = free_space(self.destination.parent)
        needed = manifest.total - here
        rate: float | None = self.order.bandwidth_limit
        if rate is None and probe and needed >= PROBE_FROM and isinstance(self.source, HttpFetcher):
            # one connection is the lower bound: the workers share the line, they do not slow each other first
            largest = max(manifest.files, key=lambda entry: entry.size)
            rate = self.source.probe(largest) or None
        return Plan(
            name=self.order.name,
            destination=str(self.destination),
            source=self.source.name,
            revision=manifest.revision,
            bytes_total=manifest.total,
            bytes_here=here,
            files=len(manifest.files),
            free=free,
            inodes_free=inodes,
            rate=rate,
            seconds=needed / rate if rate else None,
        )

    def refuse_without_space(self, plan: Plan) -> None:
        """Raise before the first byte if the file system cannot hold the rest."""
        short = plan.bytes_needed + self.order.reserve_bytes - plan.free
        if short > 0:
            raise RigctlError(
                f"{self.destination.parent} has {human_bytes(plan.free)} free, the checkpoint needs "
                f"{human_bytes(plan.bytes_needed)} and {human_bytes(self.order.reserve_bytes)} must stay "
                f"free: {human_bytes(short)} are missing; nothing was fetched"
            )
        if plan.inodes_free is not None and plan.files + self.order.reserve_inodes > plan.inodes_free:
            raise RigctlError(
                f"{self.destination.parent} has {plan.inodes_free} inodes free, the checkpoint needs "
                f"{plan.files} and {self.order.reserve_inodes} must stay free; nothing was fetched"
            )

    def _fetch_and_publish(self) -> Outcome:
        manifest = self.manifest()
        if manifest is not None:
            plan = self.plan(manifest)
            self.progress.event(plan.line().removeprefix(f"{plan.name}: "))
            self.refuse_without_space(plan)
        self._begin(manifest)
        started = time.monotonic()
        manifest, seen = self._fetch(manifest)
        self.progress.phase = "publish"
        self._check_structure()
        record = self._record("staged", manifest, Report(seen=seen, seconds=time.monotonic() - started))
        self.workplace.publish(record, replace=self._replaces)
        self.workplace.close(read_only=record.read_only)
        self.state.save(record)
        self.workplace.remove()
        return Outcome("staged", True, record)

    def _begin(self, manifest: Manifest | None) -> None:
        if self._misled:
            raise RigctlError(
                f"{self._misled} is a link that another user made, and leads where that user cannot write. If "
                f"{self.destination} is the right place: `chown -h root {self._misled}`, and deploy again"
            )
        try:
            self.workplace.begin(manifest)
        except OSError as error:
            raise disk_error(error, str(self.workplace.root)) from error
        if self.workplace.led:
            self.progress.event(
                f"{self.workplace.led}: whoever can write there can exchange the checkpoint under the engine. Only the "
                "names in root's own directory are safe; `chown root` and `chmod go-w` close it"
            )

    def _fetch(self, manifest: Manifest | None) -> tuple[Manifest, dict[str, Seen]]:
        """Fill the workplace's tree; (what it is, what stat said of each file)."""
        self.progress.phase = "fetch"
        if manifest is not None:
            self.progress.total, self.progress.files_total = manifest.total, len(manifest.files)
        source = self.source
        if isinstance(source, Generator):
            return self._generate(source, manifest)
        if manifest is None:
            raise RigctlError(f"{self.destination}: its source has listed no files")
        return manifest, self._pool(manifest.files, source)

    def _pool(self, entries: Sequence[File], source: FileSource) -> dict[str, Seen]:
        """All entries by a pool of workers; smallest first, so that a refused token shows soon."""
        seen: dict[str, Seen] = {}
        faults: list[RigctlError] = []
        with ThreadPoolExecutor(self.order.workers, thread_name_prefix="fetch") as pool:
            ordered = sorted(entries, key=lambda entry: (entry.size, entry.path))
            futures = {pool.submit(self._guarded, source, entry): entry for entry in ordered}
            for future in as_completed(futures):
                try:
                    seen[futures[future].path] = future.result()
                except RigctlError as error:
                    faults.append(error)
                except BaseException:
                    self.stop.set()
                    raise
        if faults:
            raise summary(faults, self.workplace.root)
        return seen

    def _guarded(self, source: FileSource, entry: File) -> Seen:
        """Run one file's work; a fault that every other file would meet as well stops them all."""
        if self.stop.is_set() or self._line_is_down.is_set():
            raise Cancelled
        self.progress.file_starts(entry.path, entry.size)
        right = False
        try:
            seen = self._fetch_file(source, entry)
            right = True
            return seen
        except OSError as error:
            self.stop.set()
            raise disk_error(error, entry.path) from error
        except GaveUp:
            # files that are under way may still come; to cut them off would waste what is on its way
            self._line_is_down.set()
            raise
        except Exception as error:
            if not isinstance(error, WrongBytes | SourceWrong):
                self.stop.set()
            raise
        finally:
            self.progress.file_ends(entry.path, right=right)

    def _fetch_file(self, source: FileSource, entry: File) -> Seen:
        done = self.workplace.proved(entry)
        if done is not None:
            self.progress.advance(entry.size, fetched=False)
            return done
        part = self.workplace.part(entry)
        with Sink(part, entry, self.progress, self._limiter, self.stop) as sink:
            for _ in range(2):
                source.fetch(entry, sink)
                digest = sink.finish()
                if digest == entry.digest():
                    return self.workplace.accept(entry, part)
                sink.restart(f"its bytes have {digest}, the manifest says {entry.digest()}")
        raise WrongBytes(
            f"{entry.path}: {source.name} sends {digest}, the manifest says {entry.digest()}, twice: "
            "the source is damaged or not at this revision; nothing of this file is kept"
        )

    def _generate(self, source: Generator, wanted: Manifest | None) -> tuple[Manifest, dict[str, Seen]]:
        """A source without a manifest: what it made is what it is."""
        remove_tree(self.workplace.tree)
        source.fill(self.workplace.tree)
        if not self.workplace.tree.is_dir():
            raise SourceWrong(f"{source.name} ended well, but made no directory")
        made, seen = verify.manifest_of(self.workplace.tree, source.name, revision=self.order.revision)
        if apart := wanted and made.differing(wanted):
            raise WrongBytes(f"{apart[0].path} and {len(apart) - 1} more: {source.name} makes other bytes by now")
        self.progress.total = self.progress.done = made.total
        self.progress.files_total = self.progress.files_done = len(made.files)
        return made, seen

    def _check_structure(self) -> None:
        faults = structure.check(self.workplace.tree, self.order.role).errors
        if faults:
            raise RigctlError(
                f"{self.order.name} is complete by its manifest, but not a loadable checkpoint:\n  "
                + "\n  ".join(faults)
                + f"\nit was not published: look at include and exclude; files are in {self.workplace.tree}"
            )

    # -- repair --------------------------------------------------------------------------------------------

    def repair(self, *, in_place: bool) -> Outcome:
        """Fetch what is wrong or missing in the destination, nothing else; each file is replaced whole."""
        with locked(self.state, self.order.name, self.destination), self.workplace:
            record = self.state.load(self.order.name)
            origin = record.origin if record is not None else "adopted"
            self._digests_from = record.digests_from if record is not None else self._digests_from
            if origin == "adopted" and not in_place:
                raise RigctlError(
                    f"{self.destination} is not this program's (adopted or never recorded): "
                    "writing into it needs --in-place"
                )
            if not self.destination.is_dir():
                raise RigctlError(f"{self.destination} does not exist: stage it instead")
            manifest = record.manifest if record is not None else self.manifest()
            if manifest is None:
                raise RigctlError(f"{self.order.name}: its source has no manifest, there is nothing to repair from")
            report = self._verified(manifest)
            if report.extra:
                raise extra_beside(self.destination, report.extra)
            wrong = [entry for entry in manifest.files if entry.path not in report.seen]
            if wrong:
                for text in report.lines():
                    self.progress.event(text)
                report.seen.update(self._replace(wrong, read_only=record is not None and record.read_only))
            if record is None:
                self._unless_unusable(manifest)
            found = self._saved(origin, manifest, report)
            return Outcome("repaired" if wrong else "present", bool(wrong), found)

    def _replace(self, wrong: Sequence[File], *, read_only: bool) -> dict[str, Seen]:
        """Fetch the wrong files beside the destination and move each into it."""
        part = selection(wrong)
        self.progress.done = 0
        self.refuse_without_space(self.plan(part, probe=False))
        self._begin(part)
        self._fetch(part)
        settle(self.workplace.tree, read_only)
        seen = {entry.path: self.workplace.put(entry.path) for entry in wrong}
        self.workplace.remove()
        return seen


def selection(entries: Sequence[File]) -> Manifest:
    return Manifest.listed("selection", None, entries)


def summary(faults: Sequence[RigctlError], kept: Path) -> RigctlError:
    """One error for all: the causes first, without the workers that were only told to stop."""
    causes = [one for one in faults if not isinstance(one, Cancelled)]
    if not causes:
        return Cancelled(str(kept))
    for cause in causes:
        if isinstance(cause, DiskFull):
            free, _ = free_space(kept)
            return DiskFull(
                f"the disk is full: {cause}; {human_bytes(free)} free now; what is fetched is kept in {kept}, "
                "make room and run the job again"
            )
    refused = [one for one in causes if isinstance(one, Refused)]
    # A token that is refused is refused for every file: its message is the cause of all.
    texts = list(dict.fromkeys(str(one) for one in refused[:1] or causes))
    if len(texts) == 1:
        return type(causes[0])(texts[0])
    return RigctlError(f"{len(texts)} faults; right files are kept in {kept}:\n  " + "\n  ".join(texts[:20]))


def free_space(place: Path) -> tuple[int, int | None]:
    """(bytes, inodes) still to be had on the file system of `place`; inodes None where not counted."""
    status = os.statvfs(place)
    return status.f_bavail * status.f_frsize, status.f_favail if status.f_files else None


def differing(root: Path, digests: Mapping[str, str]) -> list[str]:
    """Files that have not the sha256 that is known of them."""
    faults = []
    for path, sha256 in digests.items():
        place = root / path
        if not place.is_file():
            faults.append(f"{path} is missing")
        elif (found := verify.hash_file(place, FileHasher("sha256", 0))[0]) != f"sha256:{sha256}":
            faults.append(f"{path} has {found}, {sha256} is known of this revision")
    return faults


def half_copied(root: Path, manifest: Manifest, report: Report) -> RigctlError:
    """The message about a directory that is there, is not ours, and is not the checkpoint."""
    right = len(manifest.files) - len(report.missing) - len(report.damaged)
    faults = report.lines()
    more = f"\n  and {len(faults) - 10} more" if len(faults) > 10 else ""
    return RigctlError(
        f"{root} exists, was not made by this program and is not the whole checkpoint: {right} of "
        f"{len(manifest.files)} files fit.\n  " + "\n  ".join(faults[:10]) + more + "\n"
        "Nothing in it was touched. Move it away, complete it with `rigctl checkpoints repair --in-place`, or, if it "
        "is as you want it, take it as it lies: `source: {kind: directory}` in checkpoints.yaml."
    )
