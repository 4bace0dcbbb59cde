"""Methods of speculation: who drafts the tokens that the target then verifies."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rigctl.contract.fields import Text
from rigctl.contract.order import Part

Method = Literal["eagle3", "dflash", "mtp", "ngram", "extract_hidden_states"]
"""eagle3, dflash: a drafter of its own predicts from the target's hidden states, one token after another or a block at
once. mtp: layers in the target's own checkpoint predict the tokens after the next one. ngram: what followed the same
words earlier in the text is drafted again. extract_hidden_states: nothing is drafted; the states of some layers are
written down for a training, and the engine counts drafts of which none is accepted."""
WITH_DRAFTER: tuple[Method, ...] = ("eagle3", "dflash")
"""Methods that need a checkpoint of their own."""


EXTRACTS: Method = "extract_hidden_states"


def check_drafter(method: Method, drafter: str | None) -> None:
    """Raises ValueError for a method without the drafter that it needs, or with one that it does not have."""
    if method in WITH_DRAFTER and drafter is None:
        raise ValueError(f"{method} needs a drafter: name its checkpoint, or another method")
    if method not in WITH_DRAFTER and drafter is not None:
        raise ValueError(f"{method} has no drafter: leave it out (drafter: null), or name another method")


class Speculation(Part):
    """How a configuration speculates."""

    method: Method
    drafter: Text | None
    """Name of the checkpoint; None where the method has none of its own."""
    steps: Annotated[int, Field(ge=1)]
    draft_tokens: Annotated[int, Field(ge=1)]
    """Tokens that one step verifies, with the bonus token."""
    break_even_length: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None
    """Acceptance length below which it is slower than no speculation, where that was measured."""

    @model_validator(mode="after")
    def _drafter_where_the_method_has_one(self) -> Self:
        check_drafter(self.method, self.drafter)
        return self
