"""Dask: sums blocks on workers, which exchange them, and prints a digest of the results.

usage: dask_sum.py SCHEDULER:PORT WORKERS ROUNDS   with a scheduler and workers that have been started by `dask`
"""

import hashlib
import sys

import numpy as np
from distributed import Client
from turns import steps


def block(seed):
    return np.random.default_rng(seed).standard_normal(20_000)


def add(a, b):
    return a + b


client = Client(sys.argv[1], timeout=30)
client.wait_for_workers(int(sys.argv[2]))
digest = hashlib.sha256()
for n in steps(0, int(sys.argv[3])):
    blocks = [client.submit(block, 16 * n + i, pure=False) for i in range(16)]
    while len(blocks) > 1:
        blocks = [client.submit(add, a, b, pure=False) for a, b in zip(blocks[::2], blocks[1::2])]
    digest.update(blocks[0].result().tobytes())
print(f"client digest {digest.hexdigest()}", flush=True)
