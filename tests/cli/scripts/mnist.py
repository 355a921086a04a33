"""A loop as people write it: argparse, a DataLoader with a worker, training and evaluation by epoch."""
# ruff: noqa: T201  (a script prints)

import argparse

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset


class Digits(Dataset):
    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randn(size, 1, 12, 12, generator=generator)
        self.labels = torch.randint(10, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index], self.labels[index]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.dropout = nn.Dropout(0.25)
        self.fc = nn.Linear(100, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(functional.relu(self.conv(x)), 2)
        return functional.log_softmax(self.fc(self.dropout(torch.flatten(x, 1))), dim=1)


def train(args: argparse.Namespace, model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer) -> None:
    model.train()
    for step, (data, target) in enumerate(loader):
        optimizer.zero_grad()
        loss = functional.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item().hex()}")


def evaluate(model: nn.Module, loader: DataLoader) -> None:
    model.eval()
    with torch.no_grad():
        correct = sum((model(data).argmax(1) == target).sum().item() for data, target in loader)
    print(f"accuracy {correct / len(loader.dataset)}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--every", type=float, default=0.1, help="the learning rate, under a name that is ours too")
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(0)
    loader = DataLoader(Digits(48), batch_size=16, shuffle=True, num_workers=args.workers)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.every, momentum=0.9)
    evaluate(model, DataLoader(Digits(16), batch_size=16))
    for _ in range(args.epochs):
        train(args, model, loader, optimizer)
        evaluate(model, DataLoader(Digits(16), batch_size=16))
    print("random state", torch.get_rng_state().sum().item())


if __name__ == "__main__":
    main()
