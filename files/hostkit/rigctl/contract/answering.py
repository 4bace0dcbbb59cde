"""How a model answers: what the acceptance, the watchdog and `rigctl chat` must know of it."""

from typing import Annotated, Any, Literal

from pydantic import Field

from rigctl.contract.order import Part


class Answer(Part):
    """Whether it thinks before it answers, and how much it may write."""

    thinks: Literal["always", "asked", "never"] = "always"
    """always: a chat without further parameters has reasoning in it. asked: only when the request wants it."""
    tokens: Annotated[int, Field(ge=16)] = 512
    """What a tool call may take, with the reasoning before it."""


Sampling = dict[
    Literal["temperature", "top_p", "top_k", "min_p", "presence_penalty", "repetition_penalty"],
    Annotated[float, Field(ge=0, allow_inf_nan=False)],
]
"""What its makers recommend, as parameters of a request."""
Parameters = dict[str, Any]
"""Further parameters of a request, such as chat_template_kwargs."""
