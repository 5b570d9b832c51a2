"""XGBoost: trains one model on data that is divided among processes, and prints a digest of it.

usage: xgboost_train.py RANK SIZE ADDRESS PORT ROUNDS   rank 0 runs the tracker at this address
"""

import hashlib
import sys
import threading

import numpy as np
import xgboost
from xgboost import collective
from xgboost.tracker import RabitTracker
from turns import steps

rank, size, address, port, rounds = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
if rank == 0:
    tracker = RabitTracker(n_workers=size, host_ip=address, port=port, sortby="task")
    tracker.start()
    threading.Thread(target=tracker.wait_for, daemon=True).start()
trees = steps(rank, rounds)


class Again(xgboost.callback.TrainingCallback):
    def after_iteration(self, model, epoch, evals_log):
        return next(trees, None) is None


settings = {
    "dmlc_tracker_uri": address,
    "dmlc_tracker_port": port,
    "dmlc_task_id": str(rank),
    "dmlc_retry": 100,
}
with collective.CommunicatorContext(**settings):
    generator = np.random.default_rng(100 + rank)
    x = generator.standard_normal((2000, 20))
    y = x[:, 0] * x[:, 1] + x[:, 2] + generator.standard_normal(2000) * 0.1
    data = xgboost.DMatrix(x, y)
    next(trees)
    # The steps end the training.
    model = xgboost.train({"tree_method": "hist", "nthread": 1, "max_depth": 5}, data, num_boost_round=10**6, callbacks=[Again()])
    digest = hashlib.sha256(bytes(model.save_raw("ubj"))).hexdigest()
    print(f"rank {rank} digest {digest}", flush=True)
