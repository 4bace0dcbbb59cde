"""A drafter that a host has published: its entries in the catalogues. Pure but for the writing."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import ConfigDict

from rig.catalog.drafter_training import DrafterTraining
from rigctl.contract.fields import Sha256
from rigctl.contract.order import ContractError, Part
from rigctl.contract.served_checkpoints import Provenance, Training
from rigctl.whole_files import write_whole

WIDTH = 120
RECEIPTS = "trained"
"""Directory of the inventory with the receipts of drafters that were trained."""


class Receipt(Part):
    """Of a receipt (rigctl/training/publish.py) what the catalogue says; the rest is kept as it came."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    name: str
    training: Training
    provenance: Provenance
    files: dict[str, Sha256]
    length: float
    length_before: float

    @classmethod
    def of(cls, text: str, where: str) -> Self:
        """Read one. Raises ContractError."""
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ContractError(f"{where}: not JSON ({error})") from None
        return cls.validated(document, where)


def checkpoint_block(receipt: Receipt, entry: DrafterTraining) -> str:
    """The entry of checkpoints.yaml."""
    return _block(
        entry.publish,
        {
            "role": "drafter",
            "path": f"{{drafters}}/{entry.publish}",
            "targets": [entry.target],
            "source": {"kind": "directory"},
            "digests": dict(receipt.files),
            "training": receipt.training.model_dump(exclude_defaults=True),
            "provenance": receipt.provenance.model_dump(exclude_none=True),
            "notes": f"{receipt.length:.2f} tokens a step on held-out prompts; {receipt.length_before:.2f} before",
        },
    )


def serving_blocks(entry: DrafterTraining) -> dict[str, str]:
    """Entries of serving.yaml by name: each configuration that it was evaluated in, with the drafter."""
    found = {}
    for base in entry.evaluation.configurations:
        name = served_name(base, entry)
        content = {
            "extends": base,
            "description": f"with the drafter {entry.publish}",
            "speculation": {"drafter": entry.publish, "steps": entry.evaluation.steps},
        }
        found[name] = _block(name, content)
    return found


def served_name(base: str, entry: DrafterTraining) -> str:
    """Configuration that serves with a published drafter. No NAME-current: that word means another release."""
    return f"{base}-{entry.publish}"


def _block(name: str, content: Mapping[str, Any]) -> str:
    text = yaml.safe_dump({name: content}, sort_keys=False, width=WIDTH, allow_unicode=True, default_flow_style=None)
    return f"# Written by `make train`; {RECEIPTS}/ has its receipt.\n{text}"


def with_block(text: str, name: str, block: str) -> str:
    """A catalogue with this entry, in the place of one of the same name."""
    found = re.search(rf"(?ms)^(# Written by `make train`[^\n]*\n)?{re.escape(name)}:.*?(?=^[^\s]|\Z)", text)
    if found is None:
        return f"{text.rstrip()}\n\n{block}"
    rest = text[found.end() :]
    return text[: found.start()] + block + ("\n" + rest if rest.strip() else "")


def receipt_path(inventory: Path, name: str) -> Path:
    """Where the receipt of a published drafter is kept."""
    return inventory / RECEIPTS / f"{name}.json"


def write_entries(inventory: Path, receipt: Receipt, entry: DrafterTraining) -> Sequence[Path]:
    """Write receipt and entries; the files that changed. Raises OSError."""
    wanted = {receipt_path(inventory, entry.publish): json.dumps(receipt.model_dump(), indent=1) + "\n"}
    checkpoints, serving = inventory / "checkpoints.yaml", inventory / "serving.yaml"
    wanted[checkpoints] = with_block(checkpoints.read_text(), entry.publish, checkpoint_block(receipt, entry))
    text = serving.read_text()
    for name, block in serving_blocks(entry).items():
        # One that is there may have been edited: its drafter is the same.
        text = text if re.search(rf"(?m)^{re.escape(name)}:", text) else with_block(text, name, block)
    wanted[serving] = text
    changed = [path for path, content in wanted.items() if not path.exists() or path.read_text() != content]
    for path in changed:
        write_whole(path, wanted[path])
    return changed
