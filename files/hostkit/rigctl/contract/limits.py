"""Thresholds of serving: a host's `supervision` may set some, and the supervisor acts on all of them.

inventory/group_data/all.py documents each.
"""

from typing import Annotated

from pydantic import Field, StringConstraints

from rigctl.contract.fields import Count
from rigctl.contract.order import Part

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Limits(Part):
    """Times in the unit of their name."""

    no_progress_minutes: Positive = 25
    busy_only_minutes: Positive = 60
    busy_share: Positive = 0.05
    io_mib: Positive = 1
    gpu_step_mib: Positive = 16
    sample_seconds: Positive = 10
    gpu_free_mib: Count = 1024
    gpu_wait_seconds: Positive = 60
    shared_memory: Annotated[str, StringConstraints(pattern=r"^[0-9]+[%kmg]?$")] = "50%"
    """In the unit; the supervisor does not read it."""
    minimum_shm_mib: Count = 512
    minimum_disk_mib: Count = 2048
    acceptance_seconds: Positive = 600
    settle_seconds: Positive = 3
    repeated_words: Annotated[int, Field(ge=2)] = 8
    repeated_share: Annotated[float, Field(gt=0, le=1)] = 0.6
    watch_seconds: Positive = 30
    watch_answer_seconds: Positive = 60
    frozen_minutes: Positive = 10
    errors_in_a_row: Annotated[int, Field(ge=1)] = 3
    acceptance_floor: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.25
    window_drafts: Annotated[int, Field(ge=1)] = 200
    restarts: Count = 3
    restart_delay_seconds: Positive = 10
    restart_delay_limit_seconds: Positive = 300
    healthy_minutes: Positive = 60
    drain_seconds: Count = 60
    stop_seconds: Annotated[int, Field(ge=1)] = 60
    kept_runs: Annotated[int, Field(ge=1)] = 10
    run_log_mib: Annotated[int, Field(ge=1)] = 64
