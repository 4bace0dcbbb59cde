"""rigctl tiny-model: models of a few MB in the shape of real ones, their answers and acceptance known beforehand.

See docs/reference/tiny-models.md. The texts are in `kimi`, `qwen3` and `glm`, the engine's counters in
tests/support/tiny_models.py.
"""

import argparse
from pathlib import Path

KINDS = {
    "target": "answers, thinks, calls a tool",
    "target-degenerate": "emits one token for ever",
    "target-aux": "as target, with features that differ from layer to layer",
    "drafter-always": "every draft is accepted",
    "drafter-half": "half of the drafts are accepted (with 3 speculative tokens)",
    "drafter-never": "no draft is accepted",
    "target-wide": "as target, in Kimi-K2.5's attention shapes; divides among up to 8 GPUs",
    "topics": "says one of ten chains, which the last word of the prompt chooses",
    "drafter-always-wide": "as drafter-always, divides among up to 8 GPUs",
    "drafter-half-wide": "as drafter-half, likewise",
    "drafter-never-wide": "as drafter-never, likewise",
    "drafter-degenerate": "borrows its target's output layer: accepted whatever the target says",
    "drafter-aux-wrong": "for target-aux, without the layer ids it was made for: never accepted",
    "drafter-aux-right": "the same weights with the right layer ids: always accepted",
    "qwen3": "Qwen3, dense: answers, thinks, calls a tool",
    "glm-always": "GLM-4.5 with a head (MTP): likewise, every draft is accepted",
    "glm-half": "the same, half of the drafts are accepted (with 3 speculative tokens)",
    "glm-never": "the same, no draft is accepted",
}


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    kinds = "\n".join(f"  {kind:<19} {purpose}" for kind, purpose in KINDS.items())
    parser = subparsers.add_parser(
        "tiny-model",
        aliases=["tiny-kimi"],  # of versions that had no other family
        help="make a tiny model or a drafter for it",
        description=f"Make a tiny model or an EAGLE-3 drafter in DEST; Kimi-K2.5's without a name.\n\nkinds:\n{kinds}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", choices=KINDS, metavar="KIND")
    parser.add_argument("destination", type=Path, metavar="DEST", help="left alone if it is complete already")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the checkpoint, or find that it is there."""
    # Not above: every rigctl command imports this module, and numpy takes longer than all the rest.
    from rigctl.tiny_models.checkpoints import checkpoint_files, publish

    files = checkpoint_files(arguments.kind)
    written = publish(files, arguments.destination)
    size = sum(map(len, files.values()))
    print(f"{'written' if written else 'no change'}: {arguments.destination} ({size / 1e6:.1f} MB)")
    return 0
