"""`rigctl canary`: fixed prompts with known answers, compared with what the same model answered before.

A change of release, flags, KV cache type or drafter can leave an engine fast, accepted and wrong. Exit codes: 0 same or
better, 1 worse or no answer, 64 wrong usage, which includes that there is no baseline yet.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import time
from pathlib import Path
from statistics import fmean
from typing import Literal

from rigctl.contract import layout
from rigctl.contract.canary import (
    Answered,
    CanaryOutcome,
    CanaryPrompts,
    CanaryRun,
    Prompt,
    Settings,
    baseline_place,
    outcome_place,
)
from rigctl.contract.foreign import one_line
from rigctl.contract.happened import Started, record_text
from rigctl.errors import RigctlError
from rigctl.guarded import Place
from rigctl.services.canary_checks import asked, digest, faults
from rigctl.services.status import as_running
from rigctl.services.systemd import properties
from rigctl.supervisor.engine_client import BAD_ANSWERS, Engine, engine_of
from rigctl.supervisor.readiness import reason
from rigctl.supervisor.specification import Specification, named

USAGE = 64
LEAST = 0.5
"""A baseline with a lower score is none: the model or its prompts are wrong from the start."""
ROUNDING = 1e-9
"""A mean of equal scores may differ from them by so much."""
Verdict = Literal["same", "better", "worse"]


class Misused(RigctlError):
    """What was asked for cannot be done so; nothing is said about the model."""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("canary", help="whether a model still answers as it did before a change")
    parser.add_argument("configuration", metavar="NAME", help="a configuration that is active")
    parser.add_argument("--baseline", action="store_true", help="keep these answers to compare later ones with")
    parser.add_argument("--json", action="store_true", help="the outcome as one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Ask, compare, write down, show. Raises RigctlError when the engine does not answer."""
    try:
        specification = named(arguments.configuration)
        started = Started.read(specification.runtime)
        if started is None or properties(specification.unit, ["ActiveState"])["ActiveState"] != "active":
            raise Misused(f"{specification.name} is not active: `rigctl switch {specification.name}` starts it")
        prompts = prompts_of(specification)
        identity = started.checkpoints.get(specification.checkpoints.target) or ""
        baseline = None if arguments.baseline else _baseline(specification, identity, prompts)
    except Misused as error:
        print(f"rigctl canary: {error}")
        return USAGE
    found = ask(specification, started, prompts, identity, baseline)
    if baseline is None:
        outcome = of_baseline(found)
        if outcome.verdict != "worse":
            write(baseline_place(found.target, found.identity), CanaryRun.FILE, found)
    else:
        outcome = compared(found, baseline)
    write(outcome_place(specification.name), CanaryOutcome.FILE, outcome)
    print(json.dumps(outcome.model_dump(mode="json"), indent=2) if arguments.json else table(outcome, baseline))
    return int(outcome.verdict == "worse")


def prompts_of(specification: Specification) -> CanaryPrompts:
    """What its target is asked. Raises Misused where a deploy has not brought it; ContractError."""
    path = Path(layout.CANARY_PROMPTS, f"{specification.checkpoints.target}.json")
    if not path.is_file():
        raise Misused(f"{path} is missing: deploy again")
    return CanaryPrompts.read(path)


def prompts_digest(prompts: CanaryPrompts) -> str:
    """Of what is asked and expected; how often it is asked changes no answer."""
    return hashlib.sha256(prompts.model_copy(update={"rounds": 1}).text().encode()).hexdigest()


def _baseline(specification: Specification, identity: str, prompts: CanaryPrompts) -> CanaryRun:
    target = specification.checkpoints.target
    make = f"`rigctl canary {specification.name} --baseline` makes one of what it answers now"
    found = CanaryRun.read(baseline_place(target, identity))
    if found is None:
        raise Misused(f"there is no baseline of {target} at this revision ({one_line(identity, 60)}): {make}")
    if found.prompts != prompts_digest(prompts):
        raise Misused(f"the baseline of {target} is of other prompts than it has now: {make}")
    return found


def write(place: Place, name: str, record: CanaryRun | CanaryOutcome) -> None:
    """Put a record in place; root's directories, which nobody else can write."""
    Place(layout.STATE).make(layout.CANARY.rpartition("/")[2], 0o755)
    Place(layout.CANARY).make(place.path.rpartition("/")[2], 0o755)
    place.write(name, record_text(record.model_dump(mode="json")))


def ask(
    specification: Specification,
    started: Started,
    prompts: CanaryPrompts,
    identity: str,
    baseline: CanaryRun | None,
) -> CanaryRun:
    """All prompts, round by round; one round where it gives the baseline's texts. Raises RigctlError."""
    engine = engine_of(as_running(specification))
    answers: dict[str, list[tuple[bool, str, str | None, str]]] = {prompt.name: [] for prompt in prompts.prompts}
    try:
        for _ in range(prompts.rounds):
            for prompt in prompts.prompts:
                answers[prompt.name].append(_answer(engine, prompt))
            if baseline and all(answers[name][0][1] == known.text for name, known in baseline.answers.items()):
                break
    except BAD_ANSWERS as error:
        raise RigctlError(f"{specification.name} does not answer: {reason(error)}; see `rigctl status`") from None
    return CanaryRun(
        at=int(time.time()),
        target=specification.checkpoints.target,
        identity=identity,
        prompts=prompts_digest(prompts),
        settings=settings_of(specification, started),
        answers={
            name: Answered(
                held=[held for held, *_ in found],
                texts=[text for _, text, *_ in found],
                why=next((why for _, _, why, _ in found if why), None),
                shown=found[0][3],
            )
            for name, found in answers.items()
        },
    )


def _answer(engine: Engine, prompt: Prompt) -> tuple[bool, str, str | None, str]:
    """Whether it held, its digest, why not, and how it begins."""
    reasoning, answer, calls = asked(engine, prompt)
    wrong = faults(engine, prompt, reasoning, answer, calls)
    shown = answer or "; ".join(f"{name}({arguments})" for name, arguments in calls)
    return not wrong, digest(reasoning, answer, calls), wrong[0] if wrong else None, one_line(shown, 200)


def settings_of(specification: Specification, started: Started) -> Settings:
    """What runs: as it was started, which a later deploy does not change."""
    words = command_line(specification)
    cache = next((after for word, after in itertools.pairwise(words) if word == "--kv-cache-dtype"), "auto")
    return Settings(
        configuration=specification.name,
        digest=started.digest,
        release=started.release or specification.release,
        flags=[one_line(word) for word in words],
        cache=one_line(cache, 40) or "auto",
        method=specification.method,
        drafter=specification.checkpoints.drafter,
    )


def command_line(specification: Specification) -> list[str]:
    """The engine's own words of its unit's command line; empty where that cannot be read."""
    pid = properties(specification.unit, ["MainPID"])["MainPID"]
    try:
        words = Path("/proc", pid or "0", "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []
    return words[words.index("--") + 1 :] if "--" in words else words


def of_baseline(found: CanaryRun) -> CanaryOutcome:
    """A baseline, or why its answers are none."""
    lowest, reasons = min(found.scores), list[str]()
    if lowest < LEAST:
        reasons.append(f"score {lowest:.2f} is below {LEAST}: no baseline was written")
    reasons += [f"{name}: {one.why}" for name, one in found.answers.items() if one.why and "degenerate" in one.why]
    verdict: Verdict = "worse" if reasons else "same"
    return CanaryOutcome(verdict=verdict, reasons=reasons, run=found, baseline_at=found.at)


def compared(found: CanaryRun, baseline: CanaryRun) -> CanaryOutcome:
    """Worse is: a prompt that always held holds never; a score below the lowest of the baseline's rounds; another text
    of a deterministic engine whose settings are the baseline's."""
    reasons = []
    for name, before in baseline.answers.items():
        now = found.answers[name]
        if before.share == 1 and now.share == 0:
            reasons.append(f"{name}: {now.why}")
        elif found.settings.digest == baseline.settings.digest and before.text and now.text not in (None, before.text):
            reasons.append(f"{name}: the same settings gave another text at temperature 0")
    score, lowest, highest = fmean(found.scores), min(baseline.scores), max(baseline.scores)
    if score < lowest - ROUNDING:
        reasons.append(f"score {score:.2f} is below the baseline's {lowest:.2f} to {highest:.2f}")
    verdict: Verdict = "worse" if reasons else "better" if score > highest + ROUNDING else "same"
    return CanaryOutcome(verdict=verdict, reasons=reasons, run=found, baseline_at=baseline.at)


def table(outcome: CanaryOutcome, baseline: CanaryRun | None) -> str:
    """For people: a line a prompt, then the verdict."""
    found, made = outcome.run, outcome.run.settings
    width = max(map(len, found.answers))
    lines = [f"{'prompt':<{width}}  held   before  text"]
    for name, now in found.answers.items():
        before = baseline.answers[name] if baseline else None
        text = "differs by round" if now.text is None else "same" if before and now.text == before.text else "another"
        lines.append(
            f"{name:<{width}}  {now.share:4.0%}   {f'{before.share:.0%}' if before else '-':>6}  "
            f"{text if before else 'kept'}{f'  {now.why}' if now.why else ''}"
        )
    drafter = f", {made.method} {made.drafter or ''}".rstrip() if made.method else ""
    lines += [
        "",
        f"{found.target} by {made.configuration}: {made.release}, KV cache {made.cache}{drafter}",
        f"{'baseline' if baseline is None else 'canary'}: {outcome.verdict}, score {fmean(found.scores):.2f}"
        + (f" (baseline of {time.strftime('%Y-%m-%d %H:%M', time.localtime(baseline.at))})" if baseline else ""),
        *(f"  {each}" for each in outcome.reasons),
    ]
    return "\n".join(lines)
