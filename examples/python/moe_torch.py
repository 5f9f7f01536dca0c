# SPDX-License-Identifier: MIT OR Apache-2.0
"""A layer with a mixture of experts that is trained and compiled:

    torchrun --nproc-per-node 2 moe_torch.py         # GPUs, and NCCL
    torchrun --nproc-per-node 2 moe_torch.py --cpu   # virtual GPUs, and Gloo

Each rank has some of the experts, and a batch. After each step its sums, and the gradients of its rows and of its
router, are those of a layer that has all experts.
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from gincomm.torch import Group, combine, dispatch
from torch import nn

EXPERTS, HIDDEN, INNER, TOPK, TOKENS, STEPS = 8, 64, 32, 2, 48, 3


def results(rows, ids, weights, up, down):
    """Returns the sum of a row's experts, each times its weight. `ids` are numbers of `up` and `down`; -1 is none."""
    sums = torch.zeros_like(rows)
    for number in range(up.size(0)):
        weight = torch.where(ids == number, weights, 0.0).sum(1, keepdim=True)
        sums = sums + weight * (torch.relu(rows @ up[number]) @ down[number])
    return sums


class Layer(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group, local = group, EXPERTS // group.ranks
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.up = nn.Parameter(torch.randn(local, HIDDEN, INNER) / 8)
        self.down = nn.Parameter(torch.randn(local, INNER, HIDDEN) / 8)

    def route(self, x):
        weights, ids = self.router(x).topk(TOPK)
        return ids, weights.softmax(1)

    def forward(self, x):
        received = dispatch(x, *self.route(x), self.group)
        rows = results(received.rows, received.experts, received.weights, self.up, self.down)
        return combine(rows, received.handle)


def all_experts(parameter, ranks):
    """Returns the experts of all ranks, in order."""
    parts = [torch.empty_like(parameter) for _ in range(ranks)]
    dist.all_gather(parts, parameter.detach())
    return torch.cat(parts)


def step_of(layer, x, sums):
    """Makes the gradients of a loss. Returns the sums, and the gradients of rows and router."""
    layer.zero_grad()
    x.grad = None
    (sums - x.detach().roll(1, 1)).square().mean().backward()
    return [sums, x.grad, *(each.grad for each in layer.router.parameters())]


def main(cpu):
    device = torch.device("cpu") if cpu else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if not cpu:
        torch.cuda.set_device(device)
    # A rank that waits longer in dispatch or combine raises an error, too. In the first step it waits while others compile.
    dist.init_process_group("gloo" if cpu else "nccl", timeout=timedelta(minutes=5))
    world = dist.group.WORLD
    torch.manual_seed(world.rank())
    with Group(world, EXPERTS, HIDDEN, TOPK, tokens=TOKENS, dtype=torch.float32, device=device) as group:
        layer = Layer(group).to(device)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager" if cpu else "inductor")
        optimizer = torch.optim.SGD(layer.parameters(), lr=1e-2)
        for step in range(STEPS):
            x = torch.randn(TOKENS - 5 * step - group.rank, HIDDEN, device=device, requires_grad=True)
            up, down = all_experts(layer.up, group.ranks), all_experts(layer.down, group.ranks)
            expected = step_of(layer, x, results(x, *layer.route(x), up, down))
            for found, other in zip(step_of(layer, x, compiled(x)), expected):
                torch.testing.assert_close(found, other)
            optimizer.step()
    print(f"rank {world.rank()}: {STEPS} steps agree with a layer of all experts", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(cpu="--cpu" in sys.argv)
