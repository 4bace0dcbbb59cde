"""What the tiny Kimi-K2.5 says, and the engine's counters that follow from what each drafter proposes."""

from __future__ import annotations

from dataclasses import dataclass

from rigctl.tiny_kimi.automaton import END_OF_TURN, FIRST_CONTENT, Drafter, drafted_successors, successors


@dataclass(frozen=True)
class Prediction:
    """Increase of vLLM's `spec_decode` counters by one greedy request, and the tokens it returns."""

    drafts: int
    draft_tokens: int
    accepted: int
    accepted_per_position: tuple[int, ...]
    output_tokens: int

    @property
    def acceptance(self) -> float:
        """Accepted share of the drafted tokens, 0 to 1; 0 without drafts."""
        return self.accepted / self.draft_tokens if self.draft_tokens else 0.0


def generated_tokens(prompt_end: str) -> tuple[str, ...]:
    """What the target emits after a prompt that ends with this token, up to and with the end of turn."""
    following = successors()
    token, emitted = prompt_end, []
    while token != END_OF_TURN:
        token = following.get(token, FIRST_CONTENT)
        emitted.append(token)
    return tuple(emitted)


def predict_counters(
    prompt_end: str,
    drafter: Drafter | dict[str, str] | None,
    num_speculative_tokens: int,
    *,
    max_tokens: int | None = None,
    ignore_eos: bool = False,
) -> Prediction:
    """Simulate one greedy request of vLLM.

    `prompt_end` is the prompt's last token. The prefill yields the first token; each further step checks
    `num_speculative_tokens` drafts and yields the accepted ones and one more. Drafts beyond the end of the
    turn or beyond `max_tokens` count in the step that passes it. `drafter` may be a map of proposals.
    """
    if ignore_eos and max_tokens is None:
        raise ValueError("ignore_eos needs max_tokens: the chain never ends")
    following = successors()
    proposals = drafted_successors(drafter) if isinstance(drafter, str) else drafter
    width = num_speculative_tokens if proposals is not None else 0
    token = following.get(prompt_end, FIRST_CONTENT)
    output, drafts, per_position = 1, 0, [0] * width

    def ended() -> bool:
        return (token == END_OF_TURN and not ignore_eos) or output == max_tokens

    while not ended():
        accepted = _right_drafts(token, proposals or {}, following, width)
        drafts += 1 if width else 0
        for position in range(accepted):
            per_position[position] += 1
        for _ in range(accepted + 1):
            token, output = following[token], output + 1
            if ended():
                break
    return Prediction(drafts, drafts * width, sum(per_position), tuple(per_position), output)


def _right_drafts(token: str, proposals: dict[str, str], following: dict[str, str], limit: int) -> int:
    for count in range(limit):
        if proposals[token] != following[token]:
            return count
        token = following[token]
    return limit
