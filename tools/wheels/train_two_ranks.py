"""A training that a wheel must carry out: run by torchrun, with nothing but torch and the wheel."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("zcomm")  # found by its entry point
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for layer in (*model, model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
inputs, targets = torch.randn(64, 256), torch.randn(64, 256)
losses = []
for _ in range(5):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
if losses[-1] >= losses[0]:
    raise SystemExit(f"expected a loss that falls, got {losses}")

import zcomm  # noqa: E402

stats = zcomm.stats()
if not stats.all_gather.calls or not stats.reduce_scatter.calls:
    raise SystemExit(f"expected compressed calls, got {stats}")
print(f"rank {dist.get_rank()}: torch {torch.__version__}, loss {losses[0]:.4f} to {losses[-1]:.4f}, "
      f"{stats.all_gather.calls} gathers and {stats.reduce_scatter.calls} reductions compressed")  # fmt: skip
dist.destroy_process_group()
