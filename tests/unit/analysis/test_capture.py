import logging
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from plimsoll.errors import ArgumentError, UnsupportedTensorError
from plimsoll.unit.analysis.analyzer import source_of
from plimsoll.unit.capture.captured_program import capture
from plimsoll.unit.capture.gradient_graph import flow, operation_of
from tests.support.cases import each
from tests.support.unit.models import MODELS, DataDependent


def operations(model: nn.Module, example: object, **arguments: object) -> list[str]:
    graph = capture(model, example, **arguments).graph
    return [operation_of(node) for node in graph.nodes if node.op == "call_function"]


@each("example", [torch.randn(4, 8), (torch.randn(4, 8),), {"input": torch.randn(4, 8)}])
def test_an_example_is_a_tensor_a_tuple_or_a_mapping(example: object) -> None:
    assert operations(nn.Linear(8, 3), example) == ["linear"]


def test_the_batch_is_open_and_what_the_model_fixes_is_not() -> None:
    captured = capture(nn.Linear(8, 3), torch.randn(4, 8))
    value = next(node for node in captured.graph.nodes if node.name == "linear").meta["val"]
    assert isinstance(value.shape[0], torch.SymInt) and value.shape[1] == 3


def test_one_tensor_given_twice_is_two_inputs() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.inner(x) - 2 * y

    x = torch.randn(4, 8)
    nodes = {node.name: node for node in capture(Both(), (x, x)).graph.nodes}
    assert nodes["linear"].args[0].name == "x" and nodes["mul"].args[0].name == "y"


def test_nothing_of_the_model_is_changed() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)).eval()
    model[2].train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.randn(3)
    torch.manual_seed(5)
    level = logging.getLogger("torch.export").level
    captured = capture(model, torch.randn(4, 8, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.randn(3), expected)
    assert captured.training and [module.training for module in model] == [False, False, True]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert logging.getLogger("torch.export").level == level


def test_a_model_is_captured_as_it_trains_or_as_it_evaluates() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    for training in (True, False):
        graph = capture(model, torch.randn(4, 8), training=training).graph
        dropouts = [node.args[2] for node in graph.nodes if operation_of(node) == "dropout"]
        assert dropouts in ([training], [] if not training else [True])


def test_a_model_on_the_meta_device_is_captured() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))
        example = torch.randn(4, 8)
    assert operations(model, example) == ["linear", "gelu", "linear"]


def test_shared_parameters_are_told() -> None:
    case = MODELS["tied"]()
    assert capture(case.model, case.example).ties == (("tokens.weight", "head.weight"),)


def test_a_branch_on_data_is_refused_with_its_place() -> None:
    where = re.escape("in module 'inner.1' at ") + r".*models\.py:\d+"
    with pytest.raises(ArgumentError, match=f"control flow does not depend on.*{where}.*torch.where"):
        capture(DataDependent(), torch.randn(4, 8))


def test_what_cannot_be_captured_is_refused_with_its_place() -> None:
    class Reading(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise OSError("no such table")

    with pytest.raises(
        ArgumentError, match=r"got OSError in the root module at .*test_capture.py:\d+: no such table. Ch"
    ):
        capture(Reading(), torch.randn(4, 8))


def test_a_place_may_be_in_a_folder_whose_name_begins_like_torchs() -> None:
    source = """
class Model(nn.Linear):
    def forward(self, x):
        y = torch.linalg.pinv(super().forward(x))
        return y if y.sum() > 0 else -y
"""
    for file in (f"{Path(torch.__file__).parent}vision/model.py", "/home/someone/torch/model.py"):
        names = {"torch": torch, "nn": nn}
        exec(compile(source, file, "exec"), names)
        with pytest.raises(ArgumentError, match=re.escape(f"at {file}:5")):
            capture(names["Model"](4, 4), torch.randn(2, 4))
        exec(compile(source.replace(" if y.sum() > 0 else -y", ""), file, "exec"), names)
        model = names["Model"](4, 4)
        captured = capture(model, torch.randn(2, 4))
        node = next(node for node in captured.graph.nodes if "pinv" in node.name)
        assert source_of(node) == f"{file}:4"


def test_a_fixed_batch_is_refused() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + torch.ones(4, 8)

    with pytest.raises(ArgumentError, match="takes any batch size; got Fixed, which takes only 4 rows of 'x'"):
        capture(Fixed(), torch.randn(4, 8))


@each(
    ("example", "message"),
    [
        (torch.randn(1, 8), r"a batch of at least 2; got shape \(1, 8\)"),
        ([1, 2], "a tuple of arguments or a mapping of keyword arguments; got list"),
        ({1: torch.randn(4, 8)}, "a mapping of keyword arguments; got dict"),
        ((3,), "a tensor that has a batch dimension; got 0 tensors"),
        (torch.tensor(1.0), "a tensor that has a batch dimension; got 1 tensors"),
    ],
)
def test_an_example_that_is_none_is_refused(example: object, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        capture(nn.Linear(8, 3), example)


def test_a_call_that_does_not_fit_the_model_is_refused() -> None:
    with pytest.raises(ArgumentError, match="expected an example that Linear can be called with; got missing a req"):
        capture(nn.Linear(8, 3), {"inputs": torch.randn(4, 8)})


def test_a_sparse_example_is_refused() -> None:
    with pytest.raises(UnsupportedTensorError, match="dense tensors; got one of layout torch.sparse_coo"):
        capture(nn.Linear(8, 3), torch.eye(8).to_sparse())


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(ArgumentError, match="expected an nn.Module; got function"):
        capture(lambda x: x, torch.randn(4, 8))


def test_gradients_flow_from_the_loss_where_a_model_returns_one() -> None:
    case = MODELS["gpt"]()
    assert flow(capture(case.model, case.example)).outputs == ("cross_entropy_loss",)
    case = MODELS["pre_norm"]()
    assert flow(capture(case.model, case.example)).outputs == ("linear_8",)
