"""What a serving entry leaves to others: the entries of the checkpoints that it names. An entry of its own wins."""

from rig.catalog.yaml_source import Document
from rigctl.contract.speculation import Method

DRAFTERS_DRAFT: Method = "eagle3"
"""The method of a drafter whose entry names none."""


def with_defaults(serving: Document, checkpoints: Document) -> Document:
    """The serving entries, each with what it leaves out. Every value has the place where it stands."""
    result = Document(dict(serving.data), dict(serving.places))
    for name in serving.data:
        entry = serving.section(name).filled(_of_checkpoints(serving.section(name), checkpoints))
        result.data[name] = entry.data or serving.data[name]
        result.places |= {(name, *path): place for path, place in entry.places.items()}
    return result


def _of_checkpoints(entry: Document, checkpoints: Document) -> Document:
    """How a drafter drafts, and how many tokens the target's own head is good for."""
    speculation = entry.section("speculation")
    drafter, target = (str(one.get(key)) for one, key in ((speculation.data, "drafter"), (entry.data, "target")))
    found = checkpoints.section(drafter)
    defaults = Document({"method": found.data["method"]}, found.places) if "method" in found.data else Document()
    head = checkpoints.section(target, "heads", "mtp")
    if speculation.data.get("method") == "mtp" and "steps" in head.data:
        defaults = defaults.filled(Document({"steps": head.data["steps"]}, head.places))
    if not speculation.data:
        return Document()
    return Document(
        {"speculation": defaults.data}, {("speculation", *path): one for path, one in defaults.places.items() if path}
    )
