"""The digest by which the version before, e91294b, knows a unit: units that it started are not stale without a reason.

To be deleted in the version after this one, with `same_as` left empty.
"""

from collections.abc import Sequence

from rig.catalog.entries import Source
from rig.plan.host_plan import canonical_digest
from rigctl.contract.run_specification import RunSpecification


def digest(order: RunSpecification, sources: Sequence[Source]) -> str:
    """What the digest was over: the whole run specification but for the settings of the host, and the sources."""
    newer = {"format", "family", "endpoints", "host_settings", "digest", "same_as"}
    nested = {"limits": {"shared_memory"}, "speculation": {"method"}}
    content = order.model_dump(exclude={**dict.fromkeys(newer, True), **nested})
    listed = [source.model_dump() for source in sources]
    return canonical_digest({**content, **order.endpoint.model_dump(), "sources": listed})
