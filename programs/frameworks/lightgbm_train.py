"""LightGBM: trains one model on data that is divided among processes, and prints a digest of it.

usage: lightgbm_train.py RANK HOST:PORT,HOST:PORT,… ROUNDS
"""

import hashlib
import sys

import lightgbm
import numpy as np
from turns import steps

rank, machines, rounds = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
port = int(machines.split(",")[rank].rsplit(":")[1])
generator = np.random.default_rng(100 + rank)
x = generator.standard_normal((2000, 20))
y = x[:, 0] * x[:, 1] + x[:, 2] + generator.standard_normal(2000) * 0.1
settings = {
    "objective": "regression",
    "tree_learner": "data",
    "num_machines": len(machines.split(",")),
    "machines": machines,
    "local_listen_port": port,
    "num_threads": 1,
    "deterministic": True,
    "force_row_wise": True,
    "pre_partition": True,
    "verbosity": -1,
    "time_out": 1,
}
trees = steps(rank, rounds)


def again(now):
    if next(trees, None) is None:
        raise lightgbm.callback.EarlyStopException(now.iteration, [])


next(trees)
# The steps end the training.
model = lightgbm.train(settings, lightgbm.Dataset(x, y), num_boost_round=10**6, callbacks=[again])
text = model.model_to_string().split("end of trees")[0]
print(f"rank {rank} digest {hashlib.sha256(text.encode()).hexdigest()}", flush=True)
