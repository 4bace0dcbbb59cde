"""What was reported about host settings, as data (rig/host/evidence.yaml), and how much it weighs."""

from collections.abc import Iterable
from datetime import date as day
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Self

import yaml
from pydantic import Field, ValidationError, model_validator

from rig.catalog.yaml_source import CatalogError
from rigctl.contract.fields import Text
from rigctl.contract.order import Part, faults

FILE = Path(__file__).with_name("evidence.yaml")
EXPIRES = timedelta(days=365)
"""A report counts for so long: drivers, NCCL and engines have moved on since."""


class Report(Part):
    """One report by one author; evidence.yaml says what each key means."""

    supports: list[Text] = Field(default=[], alias="for")
    against: list[Text] = Field(default=[])
    host: Text | None = None
    driver: Text | None = None
    nccl: Text | None = None
    ranks: int | None = None
    model: Text | None = None
    figure: Text | None = None
    says: Text
    source: Text
    author: Text
    date: day
    vendor: bool = False
    collection: bool = False

    @model_validator(mode="after")
    def _speaks_of_a_rule(self) -> Self:
        if not self.supports and not self.against:
            raise ValueError("it is neither for nor against a rule")
        return self

    @property
    def brief(self) -> str:
        """What it says, its figure and where: without the host and the author."""
        return f"{self.says}{f' ({self.figure})' if self.figure else ''}: {self.source}"

    def __str__(self) -> str:
        seen = [self.host, self.driver and f"driver {self.driver}", self.nccl and f"NCCL {self.nccl}"]
        seen += [f"{self.ranks} ranks" if self.ranks else None, self.model, self.figure]
        on = f" ({'; '.join(str(one) for one in seen if one)})" if any(seen) else ""
        return f"{self.says}{on}: {self.source}, {self.author}, {self.date:%Y-%m-%d}"


class Evidence(Part):
    """The whole file. What has expired is decided by the day of its last review: no host changes with the calendar."""

    reviewed: day
    reports: list[Report]

    def about(self, rule: str) -> tuple[tuple[Report, ...], tuple[Report, ...]]:
        """Reports for and against a rule that have not expired."""
        valid = [one for one in self.reports if one.vendor or one.date + EXPIRES >= self.reviewed]
        return tuple(r for r in valid if rule in r.supports), tuple(r for r in valid if rule in r.against)


def authors(found: Iterable[Report]) -> int:
    """Independent authors of the reports."""
    weights = {one.author: 2 if one.collection else 1 for one in sorted(found, key=lambda one: one.collection)}
    return sum(weights.values())


def parse(text: str, name: str = FILE.name) -> Evidence:
    """Raises CatalogError, one line a fault, for what is no such file."""
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise CatalogError(f"{name}: {' '.join(str(error).split())}") from None
    try:
        return Evidence.model_validate(document)
    except ValidationError as error:
        raise CatalogError("\n".join(f"{name}: {fault}" for fault in faults(error, Evidence, document))) from None


@cache
def evidence() -> Evidence:
    """The file of this version."""
    return parse(FILE.read_text(encoding="utf-8"))


@cache
def reports(rule: str) -> tuple[tuple[Report, ...], tuple[Report, ...]]:
    """This version's reports for and against a rule."""
    return evidence().about(rule)
