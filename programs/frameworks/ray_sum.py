"""Ray: actors on every node exchange arrays, and the driver prints a digest of their sums.

usage: ray_sum.py ADDRESS:PORT ROUNDS   in a cluster whose nodes have been started by `ray start`
"""

import hashlib
import sys

import numpy as np
import ray
from turns import steps

ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
nodes = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])


@ray.remote(num_cpus=0.1)
class Part:
    def block(self, seed):
        return np.random.default_rng(seed).standard_normal(20_000)

    def add(self, a, b):
        return a + b


def on(node):
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
    return Part.options(scheduling_strategy=strategy).remote()


parts = [on(node) for node in nodes]
digest = hashlib.sha256()
for n in steps(0, int(sys.argv[2])):
    blocks = [part.block.remote(len(parts) * n + i) for i, part in enumerate(parts)]
    # Each part adds the block of the next one, so that arrays go from node to node.
    sums = [part.add.remote(blocks[i], blocks[i - 1]) for i, part in enumerate(parts)]
    for total in ray.get(sums):
        digest.update(total.tobytes())
print(f"driver of {len(nodes)} nodes digest {digest.hexdigest()}", flush=True)
