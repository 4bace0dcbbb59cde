"""Commands of the trainer's environment, as children of a step: their words in a log, their end in a clear failure."""

import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rigctl import builder
from rigctl.contract.foreign import printable
from rigctl.contract.training_job import TrainingJob
from rigctl.errors import RigctlError
from rigctl.training.place import Workplace

POLL_SECONDS = 1.0
LAST_BYTES = 4000
"""Of a log, shown when its command has failed."""


def environment(job: TrainingJob, place: Workplace) -> dict[str, str]:
    """Variables of a child: nothing is fetched, nothing of ours is on its path."""
    kept = {
        name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH") if name in os.environ
    }
    return {
        **kept,
        "HOME": str(place.root),
        "HF_HOME": str(place.root / "cache"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "NO_COLOR": "1",
        "COLUMNS": "1000",
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, job.trainer.gpus)),
        **job.trainer.variables,
    }


def python(job: TrainingJob) -> str:
    """The interpreter of the trainer's environment."""
    return f"{job.trainer.environment_path}/bin/python"


def speculators(job: TrainingJob, *words: str, spread: bool = False) -> list[str]:
    """A command line of speculators. spread: over all cards of the trainer (torchrun)."""
    program = [job.trainer.starter] if job.trainer.starter else ["-m", "speculators"]
    if spread and (cards := len(job.trainer.gpus)) > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(cards)]
        program = [*launcher, *(["-m", "speculators"] if program[0] == "-m" else program)]
    # -P: the directory that it runs in is ours to name files in, not to import from.
    return [python(job), "-P", *program, *words]


def run(  # noqa: PLR0913  a command, where, and what to do meanwhile
    command: Sequence[str],
    what: str,
    *,
    log: Path,
    variables: Mapping[str, str],
    directory: Path,
    watch: Callable[[], None] = lambda: None,
) -> None:
    """Run a command to its end; its words go to `log`. Raises RigctlError with the last of them if it fails."""
    builder.inside()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as words:
        words.write(f"$ {' '.join(command)}\n".encode())
        words.flush()
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=subprocess.STDOUT,
            env=dict(variables),
            cwd=directory,
        )
        try:
            while child.poll() is None:
                watch()
                time.sleep(POLL_SECONDS)
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
    watch()
    if child.returncode:
        raise RigctlError(f"{what} ended with {child.returncode}: {last_words(log)}\nThe whole of it: {log}")


def last_words(log: Path) -> str:
    """The end of a log, safe to print."""
    with log.open("rb") as handle:
        handle.seek(max(0, log.stat().st_size - LAST_BYTES))
        text = handle.read().decode(errors="replace").replace("\r", "\n")
    # Its messages stand in boxes as wide as the terminal.
    lines = (re.sub(r"[\u2500-\u257f]+|  +", " ", printable(line)).strip() for line in text.splitlines())
    return "\n".join([line for line in lines if line][-12:])
