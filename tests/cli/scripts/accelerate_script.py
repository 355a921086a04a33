"""A loop with Accelerate, which wraps the optimizer, and accumulates gradients."""
# ruff: noqa: T201  (a script prints)

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = DataLoader(TensorDataset(torch.randn(32, 8), torch.randint(3, (32,))), batch_size=8)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    steps = 0
    for x, y in data:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            steps += accelerator.sync_gradients
    print("trained", steps)


if __name__ == "__main__":
    main()
