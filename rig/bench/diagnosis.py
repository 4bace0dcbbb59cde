"""Why does speculation do badly? Each method has its own causes: of a drafter wrong features, the wrong model or plain
quality, of a model's own head (MTP) its loss, of n-gram a text that does not repeat. Pure.

Sources: engines.md 1.3; vllm#43671 (aux layers off by one: about 10 % at position 0 instead of 45 %); vllm#50170 (wrong
default layers: 1.2 % against 58.9 %); card of sakamakismile/Qwen3.6-27B-Text-NVFP4-MTP (quantisers drop the head: 0 %).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

# At position 0 the drafter needs no draft of its own: wrong features show here first. Reported: about 0.10 with layers
# off by one, 0.45 to 0.65 with sound ones.
COLLAPSED_FIRST = 0.25
SOUND_FIRST = 0.40
# Acceptance length below which a drafter hardly ever pays, used where no break-even is known.
FLOOR_LENGTH = 1.25
NOT_COUNTED = "acceptance by position was not counted"
OTHER_EPOCHS = "other epochs of the same training as variants of a sweep (key speculation.drafter), then more data"

Cause = Literal["wrong features", "wrong model", "lost head", "no repetition", "temperature", "quality"]
Weight = Literal["likely", "possible", "ruled out"]
"""In the order in which hypotheses are shown."""


@dataclass(frozen=True)
class Evidence:
    """What is known of speculation at work. positions: accepted share by position; layers: of the target."""

    method: str
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


def diagnose(evidence: Evidence) -> list[Hypothesis]:
    """Hypotheses for a low acceptance, likely ones first; none when it is not low.

    Low is below break-even, or below the floor where that is not known.
    """
    if evidence.length >= (evidence.break_even or FLOOR_LENGTH):
        return []
    asked = CAUSES.get(evidence.method, CAUSES["eagle3"])
    found = [Hypothesis(cause, *why(evidence), experiment(evidence)) for cause, (why, experiment) in asked.items()]
    return sorted(found, key=lambda hypothesis: get_args(Weight).index(hypothesis.weight))


def layer_candidates(layer_ids: Sequence[int] | None, layers: int) -> list[list[int]]:
    """The three sets of layer ids that the conventions differ by: as given, one later, one earlier.

    vLLM feeds the input of layer k, SGLang and SpecForge number outputs and add one, old speculators captured outputs.
    The default of both engines is (2, N // 2, N - 3).
    """
    given = list(layer_ids) if layer_ids else [2, layers // 2, layers - 3]
    shifted = [[layer + shift for layer in given] for shift in (0, 1, -1)]
    return [ids for ids in shifted if min(ids) >= 0 and max(ids) <= layers]


def _other_layers(evidence: Evidence) -> str:
    sets = layer_candidates(evidence.layer_ids, evidence.layers) if evidence.layers else []
    shown = ", ".join("/".join(map(str, ids)) for ids in sets) or "the ids as given, one later, one earlier"
    return f"the sweep `layer-ids`: the same drafter with {shown}"


def _features(evidence: Evidence) -> tuple[Weight, str]:
    if not evidence.positions:
        return "possible", NOT_COUNTED
    first = evidence.positions[0]
    if first < COLLAPSED_FIRST:
        return (
            "likely",
            f"only {first:.0%} are accepted at position 0, where a sound drafter has 45 % or more (vllm#43671)",
        )
    if first >= SOUND_FIRST:
        return "ruled out", f"{first:.0%} are accepted at position 0"
    return "possible", f"{first:.0%} at position 0 is between sound and collapsed"


def _model(evidence: Evidence) -> tuple[Weight, str]:
    if not evidence.targets:
        return "possible", "nobody says what the drafter was trained for"
    if evidence.target in evidence.targets:
        return "ruled out", f"it was trained for {evidence.target}"
    sound = bool(evidence.positions) and evidence.positions[0] >= SOUND_FIRST
    why = f"it was trained for {', '.join(evidence.targets)}, the target is {evidence.target}"
    return "possible" if sound else "likely", why


def _temperature(evidence: Evidence) -> tuple[Weight, str]:
    greedy = evidence.greedy_length
    if evidence.temperature == 0:
        return "ruled out", "it was measured at temperature 0"
    if greedy is None:
        return "possible", f"it was measured at temperature {evidence.temperature:g}, never at 0"
    helps = greedy > evidence.length and greedy >= (evidence.break_even or FLOOR_LENGTH)
    why = f"temperature 0 gives length {greedy:.2f} against {evidence.length:.2f}"
    return "likely" if helps else "ruled out", why


def _quality(evidence: Evidence) -> tuple[Weight, str]:
    if not evidence.positions:
        return "possible", NOT_COUNTED
    if evidence.positions[0] < COLLAPSED_FIRST:
        return "possible", "rule the others out first: training alone rarely loses position 0"
    shown = ", ".join(f"{share:.0%}" for share in evidence.positions)
    return "likely", f"acceptance falls off by position ({shown}) from a sound start"


def _head(evidence: Evidence) -> tuple[Weight, str]:
    if not evidence.positions:
        return "possible", NOT_COUNTED
    first = evidence.positions[0]
    if first < COLLAPSED_FIRST:
        return "likely", f"only {first:.0%} are accepted at position 0: the head's tensors are not those of the model"
    return "ruled out", f"{first:.0%} are accepted at position 0"


def _repetition(evidence: Evidence) -> tuple[Weight, str]:
    return "likely", "it drafts only what the text has said already, and this load repeats little"


Why = Callable[[Evidence], tuple[Weight, str]]
Experiment = Callable[[Evidence], str]

_TEMPERATURE: tuple[Why, Experiment] = (_temperature, lambda _: "the sweep `greedy`: the same cell at temperature 0")
_DRAFTER: dict[Cause, tuple[Why, Experiment]] = {
    "wrong features": (_features, _other_layers),
    "wrong model": (_model, lambda _: "a drafter trained for this target, everything else the same"),
    "temperature": _TEMPERATURE,
    "quality": (_quality, lambda _: OTHER_EPOCHS),
}
CAUSES: Mapping[str, Mapping[Cause, tuple[Why, Experiment]]] = {
    "eagle3": _DRAFTER,
    "dflash": _DRAFTER,
    "mtp": {
        "lost head": (_head, lambda _: "the checkpoint as its makers published it, everything else the same"),
        "temperature": _TEMPERATURE,
        "quality": (_quality, lambda _: "fewer steps: beyond its own layers a head drafts from its own drafts"),
    },
    "extract_hidden_states": {},  # drafts nothing
    "ngram": {
        "no repetition": (
            _repetition,
            lambda _: "a load whose answers repeat their prompts, such as code to be edited",
        ),
        "temperature": _TEMPERATURE,
    },
}
"""What may be wrong, by method: the evidence for it, and the experiment that decides."""
