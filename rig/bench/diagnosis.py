"""Why does a drafter do badly? Tells wrong features, wrong model, temperature and ordinary quality apart. Pure.

Sources: engines.md 1.3; vllm#43671 (aux layers off by one: about 10 % at position 0 instead of 45 %); vllm#50170 (wrong
default layers: 1.2 % against 58.9 %).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# At position 0 the drafter needs no draft of its own: wrong features show here first. Reported: about 0.10 with layers
# off by one, 0.45 to 0.65 with sound ones.
COLLAPSED_FIRST = 0.25
SOUND_FIRST = 0.40
# Acceptance length below which a drafter hardly ever pays, used where no break-even is known.
FLOOR_LENGTH = 1.25

Cause = Literal["wrong features", "wrong model", "temperature", "quality"]
Weight = Literal["likely", "possible", "ruled out"]


@dataclass(frozen=True)
class Evidence:
    """What is known of a drafter at work. positions: accepted share by position; layers: of the target."""

    length: float
    positions: Sequence[float]
    temperature: float
    target: str
    targets: Sequence[str]
    break_even: float | None = None
    layer_ids: Sequence[int] | None = None
    layers: int | None = None
    greedy_length: float | None = None
    """Acceptance length of the same configuration at temperature 0, where it was measured."""


@dataclass(frozen=True)
class Hypothesis:
    """A possible cause, why it is thought so, and the experiment that decides."""

    cause: Cause
    weight: Weight
    why: str
    experiment: str


def is_low(evidence: Evidence) -> bool:
    """Below break-even, or below the floor where that is not known."""
    return evidence.length < (evidence.break_even or FLOOR_LENGTH)


def diagnose(evidence: Evidence) -> list[Hypothesis]:
    """Hypotheses for a low acceptance, likely ones first; none when it is not low."""
    if not is_low(evidence):
        return []
    found = [_features(evidence), _model(evidence), _temperature(evidence), _quality(evidence)]
    order: dict[Weight, int] = {"likely": 0, "possible": 1, "ruled out": 2}
    return sorted(found, key=lambda hypothesis: order[hypothesis.weight])


def layer_candidates(layer_ids: Sequence[int] | None, layers: int) -> list[list[int]]:
    """The three sets of layer ids that the conventions differ by: as given, one later, one earlier.

    vLLM feeds the input of layer k, SGLang and SpecForge number outputs and add one, old speculators captured outputs.
    The default of both engines is (2, N // 2, N - 3).
    """
    given = list(layer_ids) if layer_ids else [2, layers // 2, layers - 3]
    shifted = [[layer + shift for layer in given] for shift in (0, 1, -1)]
    return [ids for ids in shifted if min(ids) >= 0 and max(ids) <= layers]


def _first(evidence: Evidence) -> float | None:
    return evidence.positions[0] if evidence.positions else None


def _features(evidence: Evidence) -> Hypothesis:
    first = _first(evidence)
    sets = layer_candidates(evidence.layer_ids, evidence.layers) if evidence.layers else []
    shown = ", ".join("/".join(map(str, ids)) for ids in sets) or "the ids as given, one later, one earlier"
    experiment = f"the sweep `layer-ids`: the same drafter with {shown}"
    if first is None:
        return Hypothesis("wrong features", "possible", "acceptance by position was not counted", experiment)
    if first < COLLAPSED_FIRST:
        why = f"only {first:.0%} are accepted at position 0, where a sound drafter has 45 % or more (vllm#43671)"
        return Hypothesis("wrong features", "likely", why, experiment)
    if first >= SOUND_FIRST:
        return Hypothesis("wrong features", "ruled out", f"{first:.0%} are accepted at position 0", experiment)
    return Hypothesis(
        "wrong features", "possible", f"{first:.0%} at position 0 is between sound and collapsed", experiment
    )


def _model(evidence: Evidence) -> Hypothesis:
    experiment = "a drafter trained for this target, everything else the same"
    if not evidence.targets:
        return Hypothesis("wrong model", "possible", "nobody says what the drafter was trained for", experiment)
    if evidence.target in evidence.targets:
        return Hypothesis("wrong model", "ruled out", f"it was trained for {evidence.target}", experiment)
    first = _first(evidence)
    trained = ", ".join(evidence.targets)
    weight: Weight = "likely" if first is None or first < SOUND_FIRST else "possible"
    return Hypothesis(
        "wrong model", weight, f"it was trained for {trained}, the target is {evidence.target}", experiment
    )


def _temperature(evidence: Evidence) -> Hypothesis:
    experiment = "the sweep `greedy`: the same cell at temperature 0"
    if evidence.temperature == 0:
        return Hypothesis("temperature", "ruled out", "it was measured at temperature 0", experiment)
    if evidence.greedy_length is None:
        why = f"it was measured at temperature {evidence.temperature:g}, never at 0"
        return Hypothesis("temperature", "possible", why, experiment)
    gained = evidence.greedy_length - evidence.length
    floor = evidence.break_even or FLOOR_LENGTH
    why = f"temperature 0 gives length {evidence.greedy_length:.2f} against {evidence.length:.2f}"
    decided: Weight = "likely" if gained > 0 and evidence.greedy_length >= floor else "ruled out"
    return Hypothesis("temperature", decided, why, experiment)


def _quality(evidence: Evidence) -> Hypothesis:
    experiment = "other epochs of the same training as variants of a sweep (key speculation.drafter), then more data"
    first = _first(evidence)
    if first is None:
        return Hypothesis("quality", "possible", "acceptance by position was not counted", experiment)
    if first < COLLAPSED_FIRST:
        why = "rule the others out first: training alone rarely loses position 0"
        return Hypothesis("quality", "possible", why, experiment)
    shown = ", ".join(f"{share:.0%}" for share in evidence.positions)
    return Hypothesis("quality", "likely", f"acceptance falls off by position ({shown}) from a sound start", experiment)
