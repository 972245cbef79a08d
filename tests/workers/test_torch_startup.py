"""Optimizers without torch._dynamo behave as torch's own."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys, torch
from rayzero.engine.compiling import defer_dynamo_import
from rayzero.workers.process_group import warm_up_torch

defer_dynamo_import()
defer_dynamo_import()
warm_up_torch(torch.device("cpu"))

def train(kind, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(torch.is_grad_enabled()))
    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).square().sum()
        loss.backward()
        return loss
    for _ in range(3):
        optimizer.step(closure)
        schedule.step()
    optimizer.load_state_dict(optimizer.state_dict())
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return weights, steps, torch.is_grad_enabled()

cases = [(torch.optim.AdamW, {}), (torch.optim.AdamW, {"fused": True}),
         (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adagrad, {})]
ours = [train(kind, **options) for kind, options in cases]
assert "torch._dynamo" not in sys.modules
import torch._dynamo
for (kind, options), (weights, *rest) in zip(cases, ours):
    expected, *others = train(kind, **options)
    assert torch.equal(weights, expected) and rest == others, kind

model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(4, 3)).sum().backward()
before = model.weight.detach().clone()
torch.compile(optimizer.step, backend="eager")()
assert torch.allclose(model.weight, before - 0.1 * model.weight.grad)
"""


@pytest.mark.slow
def test_results_are_those_of_torch_itself() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=200)
