"""That trainers and compilers take our scalers where they take torch's."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from plimsoll.scaling import DynamicScaler
from tests.support.scaling.steps import mlp, same_tensors, weight


def trained(scaler: Any, *, compiled: bool) -> tuple[list[float], float, int, list[torch.Tensor]]:
    """Trains, with the whole loop body compiled or not; the losses, the scale, and how often the graph broke."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend="eager", disable=not compiled)
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        losses = [step(torch.full((3, 4), 1e30 if i == 2 else 1.0 + i)).item() for i in range(4)]
    breaks = sum(counters["graph_break"].values())
    torch._dynamo.reset()
    return losses, scaler.get_scale(), breaks, list(model.parameters())


def test_a_compiled_loop_is_broken_no_more_often_than_with_gradscaler() -> None:
    losses, scale, _, weights = trained(torch.amp.GradScaler("cpu"), compiled=False)  # torch 2.9 compiles it to others
    _, _, breaks, _ = trained(torch.amp.GradScaler("cpu"), compiled=True)
    own_losses, own_scale, own_breaks, own_weights = trained(DynamicScaler("cpu"), compiled=True)
    assert (own_losses, own_scale) == (losses, scale) and same_tensors(own_weights, weights)
    assert own_breaks <= breaks


def test_gradients_that_belong_to_a_graph() -> None:
    """``backward(create_graph=True)``, as second-order methods call it."""
    parameter = weight(3.0)
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), DynamicScaler("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the cycle that this makes
        scaler.scale(parameter.square().sum()).backward(create_graph=True)
    assert parameter.grad.requires_grad
    scaler.unscale_(optimizer)
    assert parameter.grad.item() == 6.0
    parameter.grad = parameter.grad.detach()
    scaler.step(optimizer)
    assert parameter.item() == -3.0


@pytest.fixture
def accelerator() -> Iterator[Any]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


def test_accelerate(accelerator: Any) -> None:
    scaler, model = DynamicScaler("cpu"), mlp()
    accelerator.scaler = scaler
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for overflows in (False, True):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        accelerator.backward(model(torch.ones(1, 8)).sum())
        if overflows:
            model[0].weight.grad[0, 0] = torch.inf
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        assert optimizer.step_was_skipped is overflows is not scaler.outcome.stepped
        assert same_tensors(model.parameters(), before) is overflows
    assert scaler.get_scale() == 2.0**15
    restored = DynamicScaler("cpu")
    restored._lazy_init_scale_growth_tracker("cpu")  # as accelerate does when it loads a state, with a name
    assert restored.get_scale() == 2.0**16


def test_lightning(tmp_path: Path) -> None:
    import lightning.pytorch as lightning
    from lightning.pytorch.plugins import MixedPrecision

    scaler = DynamicScaler("cpu")
    stepped = []

    class Task(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = mlp()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.model(batch[0]).float().square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def on_before_zero_grad(self, optimizer: Any) -> None:
            stepped.extend([scaler.outcome.stepped] if scaler._outcome else [])

    data = torch.randn(4, 2, 8)
    data[1] = torch.inf
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data.flatten(0, 1)), batch_size=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the trainer's own
        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, gradient_clip_val=1.0, default_root_dir=tmp_path,
            plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)],
        )  # fmt: skip
        task = Task()
        trainer.fit(task, loader)
    assert scaler.get_scale() == 2.0**15
    assert stepped == [True, False, True]
    assert all(p.isfinite().all() for p in task.parameters())
    state = trainer.precision_plugin.state_dict()
    assert state == scaler.state_dict()
    trainer.precision_plugin.load_state_dict(torch.amp.GradScaler("cpu", 64.0).state_dict())
    assert scaler.get_scale() == 64.0
