"""After the start: is the engine alive, and does its drafter pay?

One slow answer says nothing (a long prefill holds everything up), so an engine counts as frozen only when for a long
time neither a question of ours was answered nor any counter moved.
"""

import time
from collections.abc import Callable
from typing import Any

import requests

from rigctl.supervisor.activity import members
from rigctl.supervisor.engine_client import BAD_ANSWERS, Engine, Metrics, Speculation
from rigctl.supervisor.listening import strangers
from rigctl.supervisor.measurement_pause import is_measured
from rigctl.supervisor.readiness import degenerate, reason, reasoning_of
from rigctl.supervisor.specification import Specification

QUESTION = [{"role": "user", "content": "Say: ready."}]
TOKENS = 16
NOTHING = Speculation(0, 0, 0)
RATE_IS = {
    True: "accepted tokens with the bonus token / all draft tokens",
    False: "accepted tokens without the bonus token / drafted tokens",
}
"""What the engines' own rate means, by whether it counts the bonus token.

SGLang up to 0.5.10.post1 does (managers/scheduler_metrics_mixin.py), so that a drafter that is never right shows 1/4
with 4 draft tokens. vLLM, and SGLang from 0.5.11, divide what was accepted by what was really drafted.
"""


def shared_port(specification: Specification) -> str | None:
    """Why not every answer at the engine's address is its own; None while it alone listens there."""
    endpoint = specification.endpoint
    found = strangers(endpoint.host, endpoint.port, members)
    if not found:
        return None
    who = " and ".join(found)
    return f"{endpoint.address} is also answered by {who} outside this unit; `rigctl free` names who holds it"


class Watch:
    """Asks one engine, round by round, and remembers when it last showed life."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._clock = engine, clock
        self._limits = engine.specification.limits
        self._alive = clock()
        self.errors: list[str] = []
        self._pulse: tuple[float, ...] = ()
        self._window: Speculation | None = None
        self._own = NOTHING  # what our own questions did to the counters since the window began
        self.answered_seconds: float | None = None
        self.acceptance_length: float | None = None
        self.own_rate: float | None = None

    def round(self) -> None:
        """Ask once, or only look while a benchmark measures. Takes as long as an answer may take; `verdict` is next."""
        asking = not is_measured(self._engine.specification)
        before = self._metrics() if asking else None
        problem = self._ask() if asking else None
        after = self._metrics()
        if after is not None:
            if after.pulse != self._pulse:
                # Somebody's request makes progress: what ours met was a full queue.
                self._alive = self._clock()
                if problem and "degenerate" not in problem:
                    problem = None
            self._pulse = after.pulse
            self._count(before, after)
        problem = shared_port(self._engine.specification) or problem
        self.errors = [*self.errors, problem] if problem else []

    def _ask(self) -> str | None:
        begun, self.answered_seconds = self._clock(), None
        try:
            patience, quiet = self._limits.watch_answer_seconds, self._engine.specification.quiet
            choice = self._engine.chat(QUESTION, max_tokens=TOKENS, timeout=patience, **quiet)
            message = choice["message"]
            texts = (reasoning_of(message), message.get("content") or "")
            bad = next(filter(None, (degenerate(text, self._limits) for text in texts)), None)
        except requests.Timeout:
            return None  # slow or frozen: time will tell
        except BAD_ANSWERS as error:
            return reason(error)
        self.answered_seconds = self._clock() - begun
        if bad:
            return f"a degenerate answer: {bad}"
        self._alive = self._clock()
        return None

    def _metrics(self) -> Metrics | None:
        try:
            return self._engine.metrics()
        except BAD_ANSWERS:
            return None

    def _count(self, before: Metrics | None, after: Metrics) -> None:
        self.own_rate = after.own_rate
        now = after.speculation
        if now is None:
            self.acceptance_length = after.own_length or None
            return
        if self._window is None or now.drafts < self._window.drafts:
            self._window, self._own = now, NOTHING
        ours = now.since(before.speculation) if before and before.speculation else NOTHING
        if ours.drafts <= TOKENS:  # nobody else's steps in between: leave them out
            self._own = self._own.plus(ours)
        others = now.since(self._window).since(self._own)
        if others.drafts >= self._limits.window_drafts:
            self.acceptance_length = others.acceptance_length
            self._window, self._own = now, NOTHING

    @property
    def below_floor(self) -> bool:
        """Whether the drafter costs more than it brings."""
        length = self.acceptance_length
        return length is not None and length < self._engine.specification.acceptance_floor

    def verdict(self) -> str | None:
        """Why the engine must be restarted; None while it is alive."""
        if len(self.errors) >= self._limits.errors_in_a_row:
            return f"{len(self.errors)} times in a row it gave no good answer, the last: {self.errors[-1]}"
        silent = self._clock() - self._alive
        if silent > self._limits.frozen_minutes * 60:
            return f"frozen: for {silent:.0f} s no answer came and no counter moved"
        return None

    def text(self) -> str:
        """One line for the unit's status."""
        if self.errors:
            return f"serving, but it gave no good answer last: {self.errors[-1]}"
        if self.answered_seconds is None:
            return f"serving; slow: no answer within {self._limits.watch_answer_seconds:g} s, watching"
        line = f"serving; answered in {self.answered_seconds:.2f} s"
        if self.acceptance_length is None:
            return line
        line += f"; acceptance length {self.acceptance_length:.2f}"
        floor = self._engine.specification.acceptance_floor
        return line + (f", BELOW {floor:g}: slower than without a drafter" if self.below_floor else "")

    def report(self) -> dict[str, Any]:
        """The same for other programs."""
        specification = self._engine.specification
        return {
            "answered_seconds": self.answered_seconds and round(self.answered_seconds, 3),
            "errors": self.errors,
            "acceptance_length": self.acceptance_length and round(self.acceptance_length, 3),
            "acceptance_floor": specification.acceptance_floor if specification.speculation else None,
            "below_floor": self.below_floor,
            "own_rate": self.own_rate,
            "own_rate_is": RATE_IS[specification.rate_counts_bonus] if self.own_rate is not None else None,
        }
