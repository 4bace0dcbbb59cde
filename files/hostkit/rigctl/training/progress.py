"""How far a step is: progress.json, rewritten as it goes, for `rigctl train status` and the lines of a deploy."""

import time
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from rigctl.contract.happened import Happened
from rigctl.training.place import Step
from rigctl.whole_files import write_json

Counted = Annotated[int, Field(ge=0, le=10**15)]
Figure = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
"""Of records that the service user writes and root reads: nothing that root's sums could not bear."""
EVERY_SECONDS = 1.0
LINE_SECONDS = 10.0


class Progressed(Happened):
    """The last word of a step. Times: Unix seconds. rows: of the step; remaining: seconds."""

    FILE = "progress.json"

    step: str = ""
    at: Figure = 0.0
    phase: str = ""
    rows_done: Counted = 0
    rows: Counted | None = None
    tokens: Counted = 0
    rate: Figure | None = None
    disk: Counted | None = None
    loss: Figure | None = None
    remaining: Figure | None = None


def line(said: Progressed) -> str:
    """One line for people."""
    words = [f"{said.step}: {said.phase}" if said.phase else said.step]
    words += [f"{said.rows_done} of {said.rows} rows" if said.rows else ""]
    words += [f"{said.tokens:,} tokens" if said.tokens else "", f"{said.rate:,.0f} tok/s" if said.rate else ""]
    words += [
        f"{said.disk / 1e9:.2f} GB" if said.disk else "",
        f"loss {said.loss:.3f}" if said.loss is not None else "",
    ]
    words += [f"{said.remaining / 60:.0f} min left" if said.remaining is not None else ""]
    return ", ".join(filter(None, words))


class Progress:
    """What a step says of itself. `tell` may be called as often as one likes."""

    def __init__(self, root: Path, step: Step) -> None:
        self._path = root / Progressed.FILE
        self._begun = time.monotonic()
        self._written = self._printed = 0.0
        self._first: dict[str, int] = {}
        self.last = Progressed(step=str(step))

    def tell(self, **known: Any) -> None:
        """phase, rows_done, rows, tokens, disk, loss; rate and time left follow from rows and tokens of this run."""
        now = time.monotonic()
        said = self.last.model_copy(update={**known, "at": time.time()})
        took = now - self._begun
        done = {key: getattr(said, key) for key in ("rows_done", "tokens")}
        self._first = {key: min(self._first.get(key, value), value) for key, value in done.items()}
        fresh = {key: value - self._first[key] for key, value in done.items()}
        rate = fresh["tokens"] / took if fresh["tokens"] else said.rate
        left = (said.rows - said.rows_done) * took / fresh["rows_done"] if said.rows and fresh["rows_done"] else None
        self.last = said.model_copy(update={"rate": rate, "remaining": left})
        if now - self._written >= EVERY_SECONDS or "phase" in known:
            self._written = now
            write_json(self._path, self.last.model_dump(), durable=False)
        if now - self._printed >= LINE_SECONDS or "phase" in known:
            self._printed = now
            print(line(self.last), flush=True)
