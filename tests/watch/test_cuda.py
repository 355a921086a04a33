"""P3 on a GPU: watching never waits for the device, adds no graph break, and works inside CUDA graphs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import plimsoll as pl
from tests.support.watch.recording import only_run, same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: synchronisation, graphs")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.cuda.set_sync_debug_mode("default")
    torch.compiler.reset()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def steps(call: nn.Module, optimizer: torch.optim.Optimizer, data: list[Tensor], *, strict: bool, amp: bool) -> None:
    scaler = torch.amp.GradScaler("cuda", enabled=amp, init_scale=1024.0)
    for index, x in enumerate(data):
        if strict and index == 6:  # by then kernels are compiled and memory is there
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16, enabled=amp):
            loss = call(x).float().square().mean()
        if amp:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("amp", [False, True])
def test_a_watched_step_does_not_synchronise(compiled: bool, amp: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net().cuda()
    twin = Net().cuda()
    twin.load_state_dict(model.state_dict())
    data = [torch.randn(32, 64, device="cuda") for _ in range(12)]
    for net, watched in ((twin, False), (model, True)):
        # Fused: its step reads no scale back, so that the scaler itself does not wait.
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
        call = torch.compile(net, fullgraph=True) if compiled else net
        if watched:
            with pl.watch(net, optimizer, run=tmp_path / "run", every=2):
                steps(call, optimizer, data, strict=True, amp=amp)
        else:
            steps(call, optimizer, data, strict=False, amp=amp)
    run = only_run(tmp_path / "run")
    assert not [event for event in run.events() if event.kind == "failure"], run.events()
    assert list(run.steps) == [0, 2, 4, 6, 8, 10]
    assert run.spectrum("activations", "layers.0:output", 10).count == 32 * 128
    assert run.spectrum("activation_gradients", "layers.2:output", 10).count == 32 * 128
    assert run.spectrum("gradients", "layers.0.weight", 10).count == 64 * 128
    assert run.spectrum("optimizer", "layers.0.weight:exp_avg", 10).count == 64 * 128
    assert len(run.scalars("loss")[0]) == 12
    pairs = list(zip(model.parameters(), twin.parameters(), strict=True))
    if compiled:  # Inductor generates other kernels around taps; on a GPU these need not sum in the same order
        assert all(torch.allclose(a, b, rtol=1e-2, atol=1e-3) for a, b in pairs)
    else:
        assert all(torch.equal(a, b) for a, b in pairs)


def test_statistics_are_those_of_the_tensors(tmp_path: Path) -> None:
    model = Net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randn(32, 64, device="cuda")
    hidden = model.layers[0](x).detach()
    before = model.layers[0].weight.detach().clone()
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        steps(model, optimizer, [x], strict=False, amp=False)
    run = only_run(tmp_path / "run")
    after = model.layers[0].weight.detach()
    assert same(run.spectrum("activations", "layers.0:output", 0), hidden)
    assert same(run.spectrum("weights", "layers.0.weight", 0), before)
    assert same(run.spectrum("updates", "layers.0.weight", 0), after - before)
    grad = model.layers[0].weight.grad
    assert grad is not None and same(run.spectrum("gradients", "layers.0.weight", 0), grad)


class Changing(nn.Module):
    """Attention, an in-place ReLU, and a residual that is added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.mlp = nn.Sequential(nn.Linear(64, 128), nn.ReLU(inplace=True), nn.Linear(128, 64))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).unflatten(0, (4, -1)).permute(2, 0, 3, 1, 4)
        y = self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        z = self.mlp(y)
        z += y
        return z


def test_eager_taps_queue_without_waiting_and_record_what_they_saw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from plimsoll.kernels import triton_backend

    torch.manual_seed(0)
    model, seen, launches = Changing().cuda(), dict[str, Tensor](), list[int]()
    for name, module in model.named_modules():  # before the taps, and of what they see
        module.register_forward_hook(lambda _m, _x, y, name=name or "model": seen.update({name: y.detach().clone()}))
    measure = triton_backend.measure
    monkeypatch.setattr(
        triton_backend, "measure", lambda tensors, *a: (launches.append(len(tensors)), measure(tensors, *a))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [torch.randn(32, 64, device="cuda") for _ in range(9)]
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1, collect=("activations", "activation_gradients")):
        steps(model, optimizer, data[:-1], strict=True, amp=False)
        torch.cuda.synchronize()
        launches.clear()
        steps(model, optimizer, data[-1:], strict=False, amp=False)
    assert len(launches) == 2 and min(launches) > 1, "one forward, one backward; what is changed in place by itself"
    run = only_run(tmp_path / "run")
    assert not [event for event in run.events() if event.kind in ("failure", "not measured")], run.events()
    last = run.steps[-1]
    for name, values in seen.items():
        assert same(run.spectrum("activations", f"{name}:output", last), values), name
    assert run.spectrum("activations", "model:scores", last).count == 4 * 4


def test_cuda_graphs_of_compiled_code_record(tmp_path: Path) -> None:
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    call = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    data = [torch.randn(32, 64, device="cuda") for _ in range(12)]
    with pl.watch(model, optimizer, run=tmp_path / "run", every=2):
        for x in data:
            torch.compiler.cudagraph_mark_step_begin()
            steps(call, optimizer, [x], strict=False, amp=False)
    run = only_run(tmp_path / "run")
    counts = [run.spectrum("activations", "layers.0:output", step).count for step in run.steps]
    assert counts == [32 * 128] * 6
    assert [run.spectrum("activation_gradients", "layers.2:output", s).count for s in run.steps] == [32 * 128] * 6


def test_a_captured_forward_and_backward_record_at_each_replay(tmp_path: Path) -> None:
    model = Net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(32, 64, device="cuda")
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                steps(model, optimizer, [x], strict=False, amp=False)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            model(x).square().mean().backward()
        for _ in range(4):
            x.copy_(torch.randn(32, 64, device="cuda"))
            graph.replay()
            optimizer.step()
    run = only_run(tmp_path / "run")
    last = run.steps[-1]
    assert run.spectrum("activations", "layers.0:output", last).count == 32 * 128
    assert same(run.spectrum("activations", "layers.0:input", last), x)
    assert run.spectrum("activation_gradients", "layers.2:output", last).count == 32 * 128
