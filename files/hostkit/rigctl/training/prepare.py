"""Answers as the data set of a rung: `speculators prepare-data`, divided by conversation, in as many parts as there is
room for.

`prepare-data` shuffles and `train` holds out the last rows: so training and held-out conversations are prepared apart
and joined.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from rigctl.contract.training_job import TrainingJob
from rigctl.errors import RigctlError
from rigctl.training import answers, text_view, tool
from rigctl.training.place import Workplace
from rigctl.training.progress import Progress
from rigctl.whole_files import read_json, write_whole

FREQUENCIES = "token_freq.pt"
ROWS = "rows.json"
JOIN = Path(__file__).with_name("join_rows.py")


def run(job: TrainingJob, place: Workplace, progress: Progress) -> None:
    """Prepare every part of the rung. What a killed run left is made anew."""
    text_view.write(Path(job.target_path), place.text_view)
    lines: dict[str, list[str]] = {}
    for row in answers.rows(place.answers / "train.jsonl"):
        line = json.dumps({"input_ids": row["input_ids"], "loss_mask": row["loss_mask"]})
        lines.setdefault(row["conversation"], []).append(line)
    order = list(lines)
    chosen = order[: place.step.rung or len(order)]
    if len(chosen) < place.parts:
        raise RigctlError(f"{len(chosen)} conversations cannot be divided into {place.parts} parts")
    progress.tell(phase="prepare", rows=place.parts)
    work = place.root / "prepared" / f".{place.step.rung}.unfinished"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    held_out = _prepare(job, place, place.answers / "held_out.jsonl", work / "held-out")

    def written(conversations: Sequence[str], name: str) -> Path:
        path = work / f"{name}.jsonl"
        write_whole(path, "\n".join(line for one in conversations for line in lines[one]) + "\n", durable=False)
        return path

    whole = _prepare(job, place, written(chosen, "rung"), work / "rung")
    for part in range(place.parts):
        mine = chosen[part * len(chosen) // place.parts : (part + 1) * len(chosen) // place.parts]
        train = (
            whole if place.parts == 1 else _prepare(job, place, written(mine, f"part-{part}"), work / f"part-{part}")
        )
        joined = work / f"joined-{part}"
        tool.run(
            [tool.python(job), "-P", str(JOIN), str(train), str(held_out), str(joined)], "joining the rows",
            log=place.root / "logs/prepare.log", variables=tool.environment(job, place), directory=work,
        )  # fmt: skip
        # One vocabulary for all parts: that of the whole rung.
        shutil.copy2(whole / FREQUENCIES, joined / FREQUENCIES)
        destination = place.at(part=part).prepared
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(destination, ignore_errors=True)
        joined.rename(destination)
        progress.tell(rows_done=part + 1)
    tokens = sum(int(row["tokens"]) for part in range(place.parts) for row in rows(place.at(part=part)))
    shutil.rmtree(work)
    shutil.rmtree(place.root / "cache", ignore_errors=True)
    progress.tell(phase="prepared", tokens=tokens)


def rows(place: Workplace) -> list[dict[str, int | str | bool]]:
    """What join_rows.py says of each row of this part, in the order of hs_<row>."""
    found = read_json(place.prepared / ROWS, "rows of the data set")
    if not isinstance(found, list):
        raise RigctlError(f"{place.prepared / ROWS} is not a list: remove {place.prepared}, then run the command again")
    return found


def _prepare(job: TrainingJob, place: Workplace, source: Path, output: Path) -> Path:
    command = tool.speculators(
        job, "prepare-data", "--model", str(place.text_view), "--data", str(source),
        "--output", str(output), "--seq-length", str(job.recipe.sequence_length), "--seed", str(job.recipe.seed),
        # Without it the draft vocabulary is ignored, silently.
        "--no-skip-token-freq", "--num-preprocessing-workers", "1", "--minimum-valid-tokens", "1",
    )  # fmt: skip
    tool.run(
        command, "speculators prepare-data", log=place.root / "logs/prepare.log",
        variables=tool.environment(job, place), directory=output.parent,
    )  # fmt: skip
    if not (output / FREQUENCIES).exists():
        raise RigctlError(f"speculators prepare-data wrote no {FREQUENCIES}: the draft vocabulary would be ignored")
    return output
