"""vLLM's connector of hidden states on a machine without an accelerator: no copy stream, no pinned memory, no events.

The engine imports this file alone (`kv_connector_module_path: cpu_connector`, this folder on PYTHONPATH): it is not in
rigctl's python. Read in vLLM 0.32.0, example_hidden_states_connector.py.
"""

import os
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class Copied:
    """In the place of a CUDA event: what it stands for has happened."""

    def query(self) -> bool:
        return True


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):  # type: ignore[misc]  # seen by the engine's python only
    """Writes each request's states at once, in the engine's own thread."""

    def _submit_async_write(self, pending: Any) -> None:
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)[:, None] * self._block_size
        slots = (blocks + torch.arange(self._block_size)).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids)).contiguous()
        lock = self._lock_fds.pop(pending.req_id, None)
        try:
            save_file({"hidden_states": states, "token_ids": pending.token_ids}, pending.filename)
        finally:
            if lock is not None:
                os.close(lock)
        self._req_copy_events[pending.req_id] = Copied()
