"""No host: recorded facts of one with eight cards, bare otherwise. `make tour` plans it; nothing is ever reached."""

from pathlib import Path as _Path

_recorded = _Path(__file__).parents[1] / "rig/facts/turin-direct.json"

gpu = [
    (
        "@fake/turin",
        {
            "fake_delay": 0,
            "fake_delay_jitter": 0,
            "fake_responses": {
                "KIMI_RIG_FACTS": _recorded.read_text(encoding="utf-8").splitlines(),
                "id -un": ["user root", "root 0"],
                # The drafters were put there by hand; the model is not there yet.
                "checkpoints status aq-medai-k2-drafter": "there",
                "checkpoints status custom-drafter": "there",
            },
        },
    )
]
