"""One process of the reduce bench's peer: ``python -P lightning_dpx/bench/peer.py RANK WORLD PORT DEVICE``.

For every line with a number of elements it all-reduces as many float32 in DDP's buckets and, on rank 0, prints the
seconds as JSON.
"""

import datetime
import json
import sys
import time

import torch
from torch import distributed

BUCKET = 25 * 2**20 // 4  # elements of DDP's default bucket of 25 MiB


def main() -> None:
    """Serves until its standard input ends."""
    rank = int(sys.argv[1])
    world = int(sys.argv[2])
    port = int(sys.argv[3])
    device = torch.device(sys.argv[4])
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, world, rank == 0, timeout=datetime.timedelta(seconds=60)
    )
    distributed.init_process_group(backend, store=store, rank=rank, world_size=world)
    print(json.dumps({"ready": True}), flush=True)
    buffers: dict[int, torch.Tensor] = {}
    for line in sys.stdin:
        size = int(line)
        if size not in buffers:
            # One size at a time: that of 1e8 elements takes 400 MB in every process.
            buffers = {size: torch.empty(size, device=device)}
        # Summed in place over and over, the values would grow to infinity.
        buffers[size].fill_(1.0)
        # All begin at once, so the time of the first rank holds no wait for a late one.
        distributed.barrier()
        started = time.perf_counter()
        # As DDP does: all buckets are under way before the first is waited for.
        works = [distributed.all_reduce(bucket, async_op=True) for bucket in torch.split(buffers[size], BUCKET)]
        for work in works:
            work.wait()
        if device.type == "cuda":
            # A work of NCCL waits in the stream, and not in this thread.
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        if rank == 0:
            print(json.dumps({"seconds": seconds}), flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
