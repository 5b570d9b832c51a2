"""JAX: trains a linear model over several processes (gRPC to find each other, Gloo for the sums), and prints a digest of the weights.

usage: jax_train.py RANK SIZE COORDINATOR:PORT STEPS
"""

import hashlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from turns import steps

rank, size, coordinator, total = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(coordinator, num_processes=size, process_id=rank)
mesh = Mesh(jax.devices(), ("data",))
divided = NamedSharding(mesh, PartitionSpec("data"))
whole = NamedSharding(mesh, PartitionSpec())


@jax.jit
def step(weights, x, y):
    loss = lambda w: jnp.mean((jnp.tanh(x @ w) - y) ** 2)
    return weights - 0.1 * jax.grad(loss)(weights)


weights = jax.device_put(np.zeros((64, 256), np.float32), whole)
generator = np.random.default_rng(100 + rank)
for _ in steps(rank, total):
    x, y = generator.standard_normal((8, 64), np.float32), generator.standard_normal((8, 256), np.float32)
    x, y = (jax.make_array_from_process_local_data(divided, a) for a in (x, y))
    weights = step(weights, x, y).block_until_ready()
result = np.asarray(weights.addressable_data(0))
print(f"rank {rank} digest {hashlib.sha256(result.tobytes()).hexdigest()}", flush=True)
jax.distributed.shutdown()
