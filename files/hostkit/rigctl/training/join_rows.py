"""Training and held-out rows as one data set whose boundary is known. Run by the trainer's python, this file alone.

python join_rows.py TRAINING HELD_OUT JOINED: `speculators train` holds out the last rows of one data set, so the held-
out conversations come last. rows.json says of each row the sha256 of its tokens (int64, little endian), their number,
and how many of them are trained on.
"""

import hashlib
import json
import sys
from pathlib import Path

from datasets import concatenate_datasets, load_from_disk

training, held_out, joined = sys.argv[1:]
parts = [load_from_disk(training), load_from_disk(held_out)]
both = concatenate_datasets(parts)
both.save_to_disk(joined)
rows = [
    {
        "sha256": hashlib.sha256(row["input_ids"].numpy().astype("<i8").tobytes()).hexdigest(),
        "tokens": len(row["input_ids"]),
        "trained": int(row["loss_mask"].sum()),
        "held_out": number >= len(parts[0]),
    }
    for number, row in enumerate(both)
]
Path(joined, "rows.json").write_text(json.dumps(rows), encoding="utf-8")
