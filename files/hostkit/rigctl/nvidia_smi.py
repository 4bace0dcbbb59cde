"""What nvidia-smi answers."""

import subprocess


def nvidia_smi(query: str) -> list[list[str]]:
    """Rows of an nvidia-smi query; none where there is no nvidia-smi or it fails."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, errors="replace", check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode != 0:  # why it fails stands on its standard output
        return []
    return [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
