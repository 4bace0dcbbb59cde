"""What the target says to the prompts: `speculators regenerate-responses`, resumed, its errors read.

Its own exit code is 0 with errors, its resume takes a conversation that was half written for a whole one, and its
errors of all runs stay in one file: all three are dealt with here.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rigctl.contract.conversations import Prompt, Split, read, split, unique
from rigctl.contract.foreign import one_line
from rigctl.contract.training_job import TrainingJob
from rigctl.errors import RigctlError
from rigctl.training import text_view, tool
from rigctl.training.place import Workplace
from rigctl.training.progress import Progress
from rigctl.whole_files import write_whole

FORGIVEN = 100
"""One conversation in so many may stay without an answer; they are named."""
HINTS = {
    "empty assistant generation": "a thought was cut: raise answers.max_tokens, or the context length of the unit",
    "HTTP 401": "the unit asks for a key, which speculators cannot send: name a keyless one of a private network",
    "HTTP 404": "the engine does not serve this model name",
    "Cannot connect": "the engine has died or does not listen: rigctl status, then the same command again",
    "Server disconnected": "the engine has died: rigctl status, then the same command again",
    "no token ids": "the engine cannot return token ids: it must be vLLM",
}


def prompts(job: TrainingJob) -> list[Prompt]:
    """All conversations of the order's files, each once."""
    return unique(prompt for file in job.prompts for prompt in read(Path(file.path), file.domain))


def divided(job: TrainingJob) -> Split:
    """Training and held-out conversations of this order."""
    return split(prompts(job), job.held_out, job.split_seed, job.ladder[-1])


def run(job: TrainingJob, place: Workplace, progress: Progress) -> None:
    """Answer every conversation that a rung or the evaluation needs; answers/train.jsonl and held_out.jsonl come
    last."""
    parts = divided(job)
    wanted = [*parts.training, *parts.held_out]
    folder = place.answers
    folder.mkdir(parents=True, exist_ok=True)
    text_view.write(Path(job.target_path), place.text_view)
    write_whole(folder / "prompts.jsonl", "".join(json.dumps(prompt.row()) + "\n" for prompt in wanted))
    answers, errors = folder / "answers.jsonl", folder / "answers.errors.jsonl"
    keep_whole(answers)
    errors.unlink(missing_ok=True)
    progress.tell(phase="answers", rows=len(wanted), rows_done=len({row["primary_id"] for row in rows(answers)}))
    command = tool.speculators(
        job, "regenerate-responses", "--endpoint", f"{job.answers.served.url}/v1/chat/completions",
        "--model", job.answers.served.model, "--dataset", str(folder / "prompts.jsonl"), "--outfile", str(answers),
        "--resume", "--max-tokens", str(job.answers.max_tokens), "--concurrency", str(job.answers.concurrency),
        "--sampling-params", json.dumps(job.answers.sampling), "--seed", str(job.split_seed),
    )  # fmt: skip
    counted = Counted(answers)

    def watch() -> None:
        counted.update()
        progress.tell(rows_done=len(counted.conversations), tokens=counted.tokens)

    tool.run(
        command, "speculators regenerate-responses", log=place.root / "logs/answers.log",
        variables=tool.environment(job, place), directory=_named(place, job.answers.served.model), watch=watch,
    )  # fmt: skip
    check(errors, len(wanted))
    write_split(parts, answers, folder)
    progress.tell(phase="answered", rows_done=len(counted.conversations), tokens=counted.tokens)


def check(errors: Path, asked: int) -> None:
    """Raises RigctlError where more conversations than are forgiven have no answer."""
    failed = list(rows(errors)) if errors.exists() else []
    if len(failed) > asked // FORGIVEN:
        said = one_line(failed[0].get("metadata", {}).get("error", "no reason given"))
        hint = next((hint for words, hint in HINTS.items() if words in said), "the same command tries these again")
        raise RigctlError(
            f"{len(failed)} of {asked} conversations have no answer, the first is {one_line(failed[0].get('id'))}: "
            f"{said}. "
            f"{hint[0].upper()}{hint[1:]}. All of them: {errors}"
        )


def keep_whole(answers: Path) -> None:
    """Cut what a killed run may have left half written: a broken last line, and the last conversation's rows.

    A conversation is written row by row; a resume takes one that has any row for done.
    """
    if not answers.exists():
        return
    lines = answers.read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    if lines:
        last = json.loads(lines[-1])["primary_id"]
        while lines and json.loads(lines[-1])["primary_id"] == last:
            lines.pop()
    with answers.open("rb+") as handle:
        handle.truncate(sum(map(len, lines)))


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSONL file that speculators wrote."""
    if path.exists():
        with path.open(encoding="utf-8") as handle:
            for number, line in enumerate(handle, 1):
                try:
                    yield json.loads(line)
                except ValueError:
                    raise RigctlError(
                        f"{path}:{number} is not JSON: remove the line, then run the command again"
                    ) from None


class Counted:
    """Conversations and tokens of the answers so far; reads only what is new."""

    def __init__(self, path: Path) -> None:
        self.conversations: set[str] = set()
        self.tokens = 0
        self._path = path
        self._read = 0

    def update(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as handle:
            handle.seek(self._read)
            for line in handle:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                row = json.loads(line)
                self.conversations.add(row["primary_id"])
                self.tokens += sum(row["loss_mask"])


def write_split(parts: Split, answers: Path, folder: Path) -> None:
    """train.jsonl in the order of the ladder, held_out.jsonl: rows with their conversation and domain."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows(answers):
        found.setdefault(row["primary_id"], []).append(row)
    for name, prompts_of in (("train", parts.training), ("held_out", parts.held_out)):
        lines = [
            json.dumps(
                {
                    "conversation": prompt.id,
                    "domain": prompt.domain,
                    "input_ids": row["input_ids"],
                    "loss_mask": row["loss_mask"],
                }
            )
            for prompt in prompts_of
            for row in found.get(prompt.id, [])
        ]
        if not lines:
            raise RigctlError(f"no conversation of {name} has an answer")
        write_whole(folder / f"{name}.jsonl", "\n".join(lines) + "\n")


def _named(place: Workplace, model: str) -> Path:
    """A directory in which the served name is the target: `--model` is both the name that is asked for and the
    tokenizer."""
    folder = place.root / "named"
    link = folder / model
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(place.text_view)
    return folder
