"""Hidden states of every row: `speculators generate-offline-data` asks the extraction unit, which writes a file a
request.

Its exit code is 0 with rows left out, so every row's file is checked. States are kept by the digest of their tokens:
rungs share them.
"""

import os
import shutil
from pathlib import Path

from rigctl.checkpoints.headers import BadFile
from rigctl.contract.foreign import one_line
from rigctl.contract.training_job import TrainingJob
from rigctl.errors import RigctlError
from rigctl.training import prepare, states_check, tool
from rigctl.training.place import Workplace
from rigctl.training.progress import Progress


def run(job: TrainingJob, place: Workplace, progress: Progress) -> None:
    """Extract what this part lacks. Files that a killed run left are checked, and taken or made anew."""
    rows = prepare.rows(place)
    staging = Path(job.states.staging)
    place.states.mkdir(parents=True, exist_ok=True)
    place.kept.mkdir(parents=True, exist_ok=True)
    if place.states.stat().st_dev != staging.stat().st_dev:
        raise RigctlError(
            f"{staging} and {place.states} are on two file systems: a move would be a copy that can be cut"
        )
    take_in(job, place, rows)
    missing = _missing(place, len(rows))
    progress.tell(phase="states", rows=len(rows), rows_done=len(rows) - len(missing))

    def watch() -> None:
        lacking = set(_missing(place, len(rows)))
        tokens = sum(int(said["tokens"]) for row, said in enumerate(rows) if row not in lacking)
        progress.tell(rows_done=len(rows) - len(lacking), tokens=tokens, disk=tokens * job.bytes_a_token)

    while missing:
        clear(staging)
        command = tool.speculators(
            job, "generate-offline-data", "--endpoint", f"{job.states.served.url}/v1",
            "--preprocessed-data", str(place.prepared), "--output", str(place.states),
            "--concurrency", str(job.states.concurrency),
        )  # fmt: skip
        failed = None
        try:
            tool.run(
                command, "speculators generate-offline-data", log=place.root / "logs/states.log",
                variables=tool.environment(job, place), directory=place.states, watch=watch,
            )  # fmt: skip
        except RigctlError as error:
            failed = error
        finally:
            clear(staging)
            take_in(job, place, rows)
        # A row is left out when its file is not written within 10 seconds of the answer, and so many in a row end the
        # command: seen on a busy machine. So whatever the command says, it is asked again as long as it brings rows.
        before, missing = len(missing), _missing(place, len(rows))
        if len(missing) == before:
            raise failed or RigctlError(
                f"{len(missing)} of {len(rows)} rows have no states, the first is row {missing[0]}: "
                f"{tool.last_words(place.root / 'logs/states.log')}\nThe same command extracts these alone."
            )
    watch()
    progress.tell(phase="extracted")


def _missing(place: Workplace, count: int) -> list[int]:
    names = {entry.name for entry in os.scandir(place.states)}
    return [row for row in range(count) if _of(place, row).name not in names]


def take_in(job: TrainingJob, place: Workplace, rows: list[dict[str, int | str | bool]]) -> None:
    """Keep each whole file under the digest of its tokens, and link what is kept already; remove what is not whole."""
    for row, said in enumerate(rows):
        mine, kept = _of(place, row), place.kept / f"{said['sha256']}.safetensors"
        if mine.exists() and kept.exists() and mine.samefile(kept):
            continue
        for path in (kept, mine):
            if path.exists():
                try:
                    states_check.check(
                        path, layers=len(job.states.layer_ids), hidden=job.hidden, sha256=str(said["sha256"])
                    )
                except BadFile as error:
                    print(f"removed: {one_line(error)}", flush=True)
                    path.unlink()
        if kept.exists():
            mine.unlink(missing_ok=True)
            os.link(kept, mine)
        elif mine.exists():
            os.link(mine, kept)


def clear(staging: Path) -> None:
    """Remove what requests left behind: a chat to the extraction unit writes a file too."""
    for stray in staging.iterdir():
        if stray.is_dir() and not stray.is_symlink():
            shutil.rmtree(stray)
        else:
            stray.unlink()


def _of(place: Workplace, row: int) -> Path:
    return place.states / f"hs_{row}.safetensors"
