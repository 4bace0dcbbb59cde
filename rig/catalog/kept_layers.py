"""What layers keep for a request, as a checkpoint's entry says it where its config.json misleads."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rigctl.contract.fields import Text
from rigctl.contract.order import Part

CacheType = Literal["bf16", "fp8", "nvfp4"]
Count = Annotated[int, Field(ge=1, lt=1 << 40)]


class KeptLayers(Part):
    """Layers that keep the same: keys and values by heads, records of a known size, or a state of a fixed size."""

    layers: Count
    heads: Count | None = None
    """Heads of keys and values, divided among the ranks."""
    head_dim: Count | None = None
    bf16: Count | None = None
    """Bytes of a record with this type of cache, whole on every rank. A type without a size is refused."""
    fp8: Count | None = None
    nvfp4: Count | None = None
    per: Count = 1
    """Tokens that one record stands for."""
    window: Count | None = None
    """Only the last tokens are kept; all when unset."""
    state: Count | None = None
    """Bytes a request whatever its length, divided among the ranks."""
    source: Text
    """Where these figures are from."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        by_heads, by_record = (self.heads, self.head_dim) != (None, None), bool(self.bf16 or self.fp8 or self.nvfp4)
        if by_heads + by_record + bool(self.state) != 1:
            raise ValueError("it has heads with head_dim, or sizes of a record (bf16, fp8, nvfp4), or a state")
        if by_heads and None in (self.heads, self.head_dim):
            raise ValueError("heads and head_dim go together")
        if self.state and (self.window or self.per != 1):
            raise ValueError("a state has neither window nor per")
        return self


class Memory(Part):
    """What the memory account takes from the entry instead of config.json."""

    cache: Annotated[list[KeptLayers], Field(min_length=1)]
    """Every layer that keeps something; several parts of one layer are several lines."""
