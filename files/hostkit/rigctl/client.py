"""Talking to an engine: chat completions and the counters of speculation."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
from prometheus_client.parser import text_string_to_metric_families

from rigctl.specification import Specification

CREDENTIAL = Path("/etc/kimi-rig/credentials/api-key")


def api_key() -> str | None:
    """The engine's API key: systemd's credential inside a unit, root's file elsewhere, or none."""
    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    path = Path(directory) / "api-key" if directory else CREDENTIAL
    try:
        return path.read_text().strip() or None
    except OSError:
        return None


@dataclass(frozen=True)
class Speculation:
    """Counters since the engine started. drafts: steps with a draft; drafted, accepted: tokens, bonus not counted."""

    drafts: int
    drafted: int
    accepted: int

    def since(self, before: Speculation) -> Speculation:
        """What happened between two readings."""
        return Speculation(self.drafts - before.drafts, self.drafted - before.drafted, self.accepted - before.accepted)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens a step yields: 1 + accepted drafts a step. None before the first step."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    @property
    def acceptance(self) -> float | None:
        """Accepted share of the drafted tokens, 0 to 1."""
        return self.accepted / self.drafted if self.drafted else None


class Engine:
    """One engine's HTTP interface. Every call raises requests.RequestException when it is not answered."""

    def __init__(self, specification: Specification, key: str | None = None) -> None:
        self.specification = specification
        self._session = requests.Session()
        self._session.trust_env = False  # no proxy stands between rigctl and this machine
        if key:
            self._session.headers["Authorization"] = f"Bearer {key}"

    def models(self, timeout: float = 5) -> list[str]:
        """Names of the served models."""
        return [entry["id"] for entry in self._get("/v1/models", timeout).json()["data"]]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int = 128,
        temperature: float | None = 0,
        timeout: float = 300,
        **more: Any,
    ) -> dict[str, Any]:
        """One chat completion; the first choice of the answer, with its message."""
        body = {"model": self.specification.model, "messages": list(messages), "max_tokens": max_tokens, **more}
        if temperature is not None:
            body["temperature"] = temperature
        response = self._session.post(f"{self.specification.base_url}/v1/chat/completions", json=body, timeout=timeout)
        response.raise_for_status()
        choice: dict[str, Any] = response.json()["choices"][0]
        return choice

    def speculation(self, timeout: float = 5) -> Speculation | None:
        """The counters of speculation; None where the engine exports none (no drafter, or gauges only)."""
        names = {
            "vllm": {
                "vllm:spec_decode_num_drafts_total": "drafts",
                "vllm:spec_decode_num_draft_tokens_total": "drafted",
                "vllm:spec_decode_num_accepted_tokens_total": "accepted",
            }
        }.get(self.specification.engine, {})
        counted: dict[str, int] = {}
        for family in text_string_to_metric_families(self._get("/metrics", timeout).text):
            for sample in family.samples:
                if sample.name in names:
                    counted[names[sample.name]] = counted.get(names[sample.name], 0) + int(sample.value)
        return Speculation(**counted) if len(counted) == len(names) > 0 else None

    def completion(self, prompt: str, *, timeout: float = 300, **parameters: Any) -> dict[str, Any]:
        """The whole answer to one user message, with its usage."""
        body = {"model": self.specification.model, "messages": [{"role": "user", "content": prompt}], **parameters}
        response = self._session.post(f"{self.specification.base_url}/v1/chat/completions", json=body, timeout=timeout)
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer

    def post(self, path: str, timeout: float) -> None:
        """POST without a body, such as start_profile."""
        self._session.post(f"{self.specification.base_url}/{path}", timeout=timeout).raise_for_status()

    def metrics(self, timeout: float = 5) -> str:
        """/metrics as it stands."""
        return self._get("/metrics", timeout).text

    def _get(self, path: str, timeout: float) -> requests.Response:
        response = self._session.get(self.specification.base_url + path, timeout=timeout)
        response.raise_for_status()
        return response
