"""mpi4py: reduces and exchanges arrays, and prints a digest of all results. usage: mpi4py_sum.py ROUNDS"""

import hashlib
import sys

import numpy as np
from mpi4py import MPI
from turns import steps

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
generator = np.random.default_rng(100 + rank)
digest = hashlib.sha256()
for n in steps(rank, int(sys.argv[1])):
    mine = generator.standard_normal(20_000)
    total = np.empty_like(mine)
    comm.Allreduce(mine, total)
    digest.update(total.tobytes())
    # Pickled objects of different sizes, all to all.
    length = n % 1000 * 7
    for words in comm.alltoall([{"from": rank, "to": to, "data": bytes(length + to)} for to in range(size)]):
        assert words["to"] == rank and words["data"] == bytes(length + rank)
digests = comm.allgather(digest.hexdigest())
assert len(set(digests)) == 1
if rank == 0:
    print(f"all ranks digest {digests[0]}", flush=True)
