"""A short all-reduce between all cards: sent to a host on standard input, run by an engine environment's python.

Arguments: number of ranks, "nccl" or "gloo". Prints "sum ok, N GB/s" (bus bandwidth at 32 MiB, as nccl-tests count it);
hangs where P2P dead-locks, so the caller sets the limit.
"""

import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

MIB_ELEMENTS = 1 << 18  # float32
ROUNDS = 10


def work(rank: int, ranks: int, backend: str, meeting: str) -> None:
    """Sum rank + 1 over all ranks on 32 KiB and 32 MiB; rank 0 tells the bandwidth of the latter."""
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    for elements in (MIB_ELEMENTS // 32, MIB_ELEMENTS * 32):
        for _ in range(ROUNDS):
            values = torch.full((elements,), float(rank + 1), device=device)
            dist.all_reduce(values)
            if values.min() != values.max() or values[0] != ranks * (ranks + 1) / 2:
                raise SystemExit(f"rank {rank}: wrong sum {values.min()} to {values.max()}")
    values = torch.zeros(MIB_ELEMENTS * 32, device=device)
    finished(device)
    begin = time.monotonic()
    for _ in range(ROUNDS):
        dist.all_reduce(values)
    finished(device)
    moved = 2 * (ranks - 1) / ranks * ROUNDS * values.numel() * values.element_size()
    if rank == 0:
        print(f"sum ok, {moved / (time.monotonic() - begin) / 1e9:.1f} GB/s", flush=True)
    dist.destroy_process_group()


def finished(device: torch.device) -> None:
    """Wait until the card has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = (int(sys.argv[1]), sys.argv[2], f"{folder}/meeting")
        # fork: a script on standard input cannot be imported by spawned processes, and no rank has touched CUDA yet.
        mp.start_processes(work, args=arguments, nprocs=arguments[0], start_method="fork")
