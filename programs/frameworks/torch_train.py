"""PyTorch: trains a small network with DistributedDataParallel over Gloo, and prints a digest of its weights.

To be started by torchrun. usage: torch_train.py STEPS
"""

import hashlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from turns import steps

total = int(sys.argv[1])
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
data = torch.Generator().manual_seed(100 + rank)
for _ in steps(rank, total):
    x = torch.randn(32, 64, generator=data)
    y = torch.randn(32, 8, generator=data)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
digest = hashlib.sha256()
for weight in model.parameters():
    digest.update(weight.detach().numpy().tobytes())
print(f"rank {rank} digest {digest.hexdigest()}", flush=True)
dist.destroy_process_group()
