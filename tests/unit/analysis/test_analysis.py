"""The rules, the bridges, residual additions, parameters: what the analysis says of small graphs."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (torch's custom)

from plimsoll.errors import ArgumentError
from plimsoll.unit import formulas
from plimsoll.unit.analysis.analyzer import Analysis, analyse
from plimsoll.unit.capture.captured_program import capture
from plimsoll.unit.capture.gradient_graph import clusters, free_edges
from plimsoll.unit.changes import ONE, Factor, NodeChange
from plimsoll.unit.formulas import nonlinear, off_centre
from tests.support.cases import each
from tests.support.unit.interpreter import analysed, captured
from tests.support.unit.models import CAPTURED, MODELS

pytestmark = CAPTURED


def of(model: nn.Module, example: Any, **arguments: Any) -> Analysis:
    return analyse(capture(model, example), **arguments)


class Of(nn.Module):
    """A function with parameters of given shapes as a model."""

    def __init__(self, function: Any, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape)))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def only(analysis: Analysis, operation: str) -> NodeChange:
    (found,) = [change for change in analysis.changes.values() if change.operation == operation]
    return found


def test_a_linear_layer_by_itself_has_its_own_factors_each_way() -> None:
    change = only(of(nn.Linear(64, 16), torch.randn(4, 5, 64)), "linear")
    rows = Factor(value=1.0, of="input", dims=(0, 1), power=-0.5)
    assert change.output.forward == Factor(value=64**-0.5) and change.output.backward == ONE
    assert change.inputs[0].backward == Factor(value=16**-0.5)
    assert change.inputs[1].backward == rows and change.inputs[2].backward == rows


@each(
    ("function", "shape"),
    [
        (lambda m, x: x @ m.w, (64, 16)),
        (lambda m, x: F.linear(x, weight=m.w), (16, 64)),
        (lambda m, x: F.linear(input=x, weight=m.w, bias=None), (16, 64)),
        (lambda m, x: x @ m.w.t(), (16, 64)),
        (lambda m, x: torch.einsum("...i,oi->...o", x, m.w), (16, 64)),
        (lambda m, x: torch.einsum("bti,io", x, m.w), (64, 16)),
        (lambda m, x: torch.addmm(m.b, x.flatten(0, 1), m.w), (64, 16)),
        (lambda m, x: F.conv1d(x.transpose(1, 2), m.w[:, :, None]), (16, 64)),
    ],
)
def test_every_way_to_write_a_product_with_a_weight_has_the_same_factors(function: Any, shape: Any) -> None:
    analysis = of(Of(function, w=shape, b=(16,)), torch.randn(4, 5, 64))
    products = [
        c for c in analysis.changes.values() if c.operation in ("linear", "matmul", "einsum", "addmm", "conv1d")
    ]
    (change,) = products
    assert change.output.forward.value == pytest.approx(64**-0.5) and change.output.forward.of is None
    backward = [scale.backward for scale in change.inputs.values()]
    assert any(one.value == pytest.approx(16**-0.5) and one.of is None for one in backward)
    weights = [one for one in backward if one.of is not None]
    assert weights and all(one.value == pytest.approx(1) and one.power == -0.5 for one in weights)
    assert analysis.parameters["w"].draw == "normal" and analysis.parameters["w"].kind == "weight"


def test_a_product_of_activations_counts_what_each_sums_over() -> None:
    analysis = of(Of(lambda m, x: (x @ m.w) @ (x @ m.v).transpose(1, 2), w=(8, 32), v=(8, 32)), torch.randn(4, 6, 8))
    change = [one for one in analysis.changes.values() if one.operation == "matmul"][-1]
    # Both operands come from x: no bridges, so one factor of 32, 6 and 6.
    expected = formulas.root(32) ** (1 / 3) * 6 ** (-0.5 * 2 / 3)
    assert change.output.forward == change.inputs[0].backward == change.inputs[1].backward
    factor = change.output.forward
    assert factor.value * 6.0**factor.power == pytest.approx(expected)


@each("constraint", ["gmean", "hmean", "amean", "to_output_scale", "to_grad_input_scale"])
def test_an_edge_with_a_way_around_it_shares_one_factor(constraint: Any) -> None:
    model = Of(lambda m, x: (h := x @ m.w) + F.gelu(h @ m.u) @ m.d, w=(8, 8), u=(8, 32), d=(32, 8))
    analysis = of(model, torch.randn(4, 8), constraint=constraint)
    first, up, down = (one for one in analysis.changes.values() if one.operation == "matmul")
    assert first.output.forward.value == pytest.approx(8**-0.5)
    a, b = 8**-0.5, 32**-0.5
    expected = {"gmean": (a * b) ** 0.5, "hmean": 2 / (1 / a + 1 / b), "amean": (a + b) / 2,
                "to_output_scale": a, "to_grad_input_scale": b}[constraint]  # fmt: skip
    assert up.output.forward.value == pytest.approx(expected)
    # At the branch's start the gradient is multiplied by sqrt(tau) besides.
    assert up.inputs[0].backward.value == pytest.approx(expected * 0.5**0.5)
    assert down.inputs[0].backward == down.output.forward


def test_with_no_constraint_every_operation_keeps_its_own_factor_forward() -> None:
    analysis = analysed("gpt", None)
    assert {change.operation for change in analysis.changes.values()} >= {"linear", "gelu"}
    for name, change in analysis.changes.items():
        if change.operation == "linear":
            source = analysis.flow.nodes[name].args[0]
            # Behind a GELU the mean is not zero, and the product sums second moments.
            moment = (1 + off_centre("gelu")[1] ** 2) ** 0.5 if source.name.startswith("gelu") else 1
            assert change.output.forward == Factor(value=pytest.approx(source.meta["val"].shape[-1] ** -0.5 / moment))
        if change.operation == "gelu":
            assert change.output.forward == Factor(value=nonlinear("gelu").output)


def test_the_free_edges_are_the_bridges() -> None:
    """Against the definition: an edge is free if removing it parts its two ends."""
    import networkx as nx

    graph = analysed("two_losses").flow
    free = free_edges(graph, clusters(graph))
    for edge in graph.edges:
        rest: nx.MultiGraph[str] = nx.MultiGraph((one.source, one.target) for one in graph.edges if one != edge)
        joined = edge.source in rest and edge.target in rest and nx.has_path(rest, edge.source, edge.target)
        assert (edge in free) is not joined, edge
    assert free and len(free) < len(graph.edges)


@pytest.mark.parametrize("name", MODELS)
def test_a_factor_follows_only_what_is_known_by_then(name: str) -> None:
    order = [node.name for node in captured(name).graph.nodes]
    for constraint in ("gmean", None):
        for at, change in analysed(name, constraint).changes.items():
            for scale in (change.output, *change.inputs.values()):
                for factor in (scale.forward, scale.backward):
                    assert factor.of is None or order.index(factor.of) < order.index(at)
                    assert math.isfinite(factor.value) and factor.value > 0


def test_residual_branches_count_alike_by_default() -> None:
    joins = {name: why for name, why in analysed("gpt").reasons.items() if why.startswith("residual")}
    assert list(joins.values()) == [
        "residual (attention), tau 0.5", "residual (mlp), tau 0.3333", "residual (attention), tau 0.25",
        "residual (mlp), tau 0.2",
    ]  # fmt: skip
    change = analysed("gpt").changes[next(iter(joins))]
    assert change.inputs[0].forward.value == pytest.approx(0.5**0.5)  # the skip path, both ways
    assert change.inputs[0].backward.value == pytest.approx(0.5**0.5)
    assert change.inputs[1].forward.value == pytest.approx(0.5**0.5)  # the branch: forward only
    assert change.inputs[1].backward == ONE


def test_behind_a_norm_the_count_begins_anew() -> None:
    taus = [why for why in analysed("post_norm").reasons.values() if why.startswith("residual")]
    assert len(taus) == 4 and all(why.endswith("tau 0.5") for why in taus)


@pytest.mark.parametrize(
    ("tau", "expected"),
    [(0.25, [0.25] * 4), ({"attention": 0.1, "mlp": 0.2, "other": 0.5}, [0.1, 0.2, 0.1, 0.2])],
)
def test_the_weight_of_a_branch_may_be_given(tau: Any, expected: list[float]) -> None:
    analysis = analyse(captured("gpt"), residual_tau=tau)
    found = [why for why in analysis.reasons.values() if why.startswith("residual")]
    assert [float(why.split()[-1]) for why in found] == expected


@each("tau", [0, 1, -0.5, 2.0, True, "half", float("nan")])
def test_a_weight_outside_its_range_is_refused(tau: Any) -> None:
    with pytest.raises(ArgumentError, match="expected residual_tau to be a number above 0 and below 1; got"):
        analyse(captured("linear"), residual_tau=tau)


def test_kinds_of_branches_that_are_missing_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"kinds attention, mlp and other; got \['mlp'\]"):
        analyse(captured("linear"), residual_tau={"mlp": 0.5})


def test_an_unknown_constraint_is_refused() -> None:
    with pytest.raises(ArgumentError, match="convert: expected constraint to be None, 'gmean'"):
        analyse(captured("linear"), constraint="median")  # type: ignore[arg-type]


def test_an_addition_weighs_every_term_alike() -> None:
    """BERT's embeddings: three terms, added in two additions."""
    analysis = analysed("bert")
    first, second = analysis.changes["add_1"], analysis.changes["add_2"]
    assert first.inputs[0].forward.value == pytest.approx(0.5**0.5)
    assert second.inputs[0].forward.value == pytest.approx((2 / 3) ** 0.5)
    assert second.inputs[1].forward.value == pytest.approx((1 / 3) ** 0.5)


def test_a_mask_is_no_term() -> None:
    model = Of(lambda m, x: (x @ m.w + torch.full((1, 8), -1.0)).softmax(-1), w=(8, 8))
    add = [change for change in of(model, torch.randn(4, 8)).changes.values() if change.operation == "add"]
    assert all(scale.forward == ONE for change in add for scale in (change.output, *change.inputs.values()))


def test_a_constant_is_undone() -> None:
    change = only(of(Of(lambda m, x: x @ m.w * 0.125, w=(8, 8)), torch.randn(4, 8)), "mul")
    assert change.output.forward.value == 8.0 and change.inputs[0].backward.value == 8.0


def test_a_loss_keeps_its_value_and_its_gradient_begins_at_unit_scale() -> None:
    change = only(analysed("gpt"), "cross_entropy_loss")
    assert change.output.forward == ONE
    assert change.output.backward.power == 1 and change.output.backward.value == 1
    assert change.inputs[0].backward.value == pytest.approx(64 / 63**0.5) and change.inputs[0].forward == ONE


def test_losses_that_are_added_share_what_comes_to_them() -> None:
    analysis = analysed("two_losses")
    incoming = {name: c.output.backward for name, c in analysis.changes.items() if c.output.backward != ONE}
    assert set(incoming) == set(analysis.flow.outputs)


def test_operations_written_in_several_are_one() -> None:
    """GPT-2's own GELU: inside nothing is scaled, and the whole has the factors of the GELU by tanh."""
    reasons = analysed("gpt2", None).reasons
    whole = [name for name, why in reasons.items() if why == "8 operations as one, by measurement"]
    assert len(whole) == 2
    change = analysed("gpt2", None).changes[whole[0]]
    assert change.output.forward.value == pytest.approx(nonlinear("gelu_tanh").output, rel=0.02)
    inside = {name for name, why in reasons.items() if why.startswith("part of")}
    assert len(inside) == 14
    for name in inside & set(analysed("gpt2", None).changes):  # only the gradient that leaves the whole is multiplied
        change = analysed("gpt2", None).changes[name]
        scales = [change.output, *change.inputs.values()]
        assert all(scale.forward == ONE for scale in scales) and change.output.backward == ONE


def test_a_norm_by_hand_and_rotated_halves_stay_what_they_are() -> None:
    analysis = analysed("gated")
    wholes = {name: why for name, why in analysis.reasons.items() if "as one" in why}
    assert len(wholes) == 2
    for name in wholes:  # both keep unit scale by themselves
        assert analysis.changes[name].output.forward.value == pytest.approx(1, abs=0.02)


def test_parameters_are_drawn_by_their_use() -> None:
    drawn = {name: (change.draw, change.kind) for name, change in analysed("tied").parameters.items()}
    assert drawn["tokens.weight"] == drawn["head.weight"] == ("normal", "embedding")
    assert drawn["positions"] == ("normal", "embedding")
    assert drawn["blocks.0.norm1.weight"] == ("ones", "norm") and drawn["blocks.0.norm1.bias"] == ("zeros", "norm")
    assert drawn["blocks.0.up.weight"] == ("normal", "weight") and drawn["blocks.0.up.bias"] == ("zeros", "bias")
    drawn = {name: (change.draw, change.kind) for name, change in analysed("resnet").parameters.items()}
    assert drawn["bn1.weight"] == ("ones", "norm") and drawn["bn1.bias"] == ("zeros", "norm")
    drawn = {name: (change.draw, change.kind) for name, change in analysed("matmul").parameters.items()}
    assert drawn["b"] == ("zeros", "bias") and drawn["w"] == ("normal", "weight")
    assert analysed("gated").parameters["norm.weight"].draw == "ones"
    every = MODELS["gpt2"]().model.named_parameters(remove_duplicate=False)
    assert set(analysed("gpt2").parameters) == {name for name, _ in every}


def test_a_shared_parameter_has_one_factor_in_all_its_uses() -> None:
    analysis = analysed("tied")
    table = only(analysis, "embedding").inputs[0].backward
    head = [change for change in analysis.changes.values() if change.operation == "linear"][-1]
    assert head.inputs[1].backward.of == table.of and head.inputs[1].backward.power == table.power
    assert head.inputs[1].backward.value == pytest.approx(table.value * head.output.forward.value)


def test_what_no_rule_knows_is_left_and_listed() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.cell(x)[0])

    analysis = of(Recurrent(), torch.randn(4, 5, 8))
    (left, *kept) = analysis.skipped
    assert left.operation == "lstm" and left.module == "cell" and left.why == "no rule for this operation"
    assert "test_analysis.py:" in str(left)
    cell = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    assert {one.operation for one in kept} == {f"parameter {kind}_l0" for kind in cell}
    assert analysis.parameters["cell.weight_ih_l0"].draw == "keep"
    assert analysis.parameters["out.weight"].draw == "normal"


def test_nothing_is_left_of_the_models_that_are_known() -> None:
    assert {name: analysed(name).skipped for name in MODELS if analysed(name).skipped} == {}


def test_a_tensor_written_in_place_and_read_under_another_name_is_refused() -> None:
    def writing(m: Any, x: Tensor) -> Tensor:
        h = x @ m.w
        part = h[:, :4]
        part.relu_()
        return h

    with pytest.raises(
        ArgumentError, match=r"written in place and read again.*relu_ in the root module at .*:\d+, read"
    ):
        of(Of(writing, w=(8, 8)), torch.randn(4, 8))


def test_in_place_is_fine_where_nothing_else_reads() -> None:
    assert not of(Of(lambda m, x: (x @ m.w).relu_(), w=(8, 8)), torch.randn(4, 8)).skipped


def test_a_model_without_values_is_analysed_alike() -> None:
    """On the meta device there is nothing to measure with but shapes; a causal mask made of sizes is still known."""
    model = MODELS["gpt_by_hand"]().model
    example = MODELS["gpt_by_hand"]().example
    meta = analyse(capture(model.to("meta"), {name: x.to("meta") for name, x in example.items()}))
    real = analyse(capture(MODELS["gpt_by_hand"]().model, example))
    assert meta.changes == real.changes and meta.parameters == real.parameters and not meta.skipped


def test_a_token_of_its_own_is_drawn_like_an_embedding() -> None:
    model = Of(lambda m, x: torch.cat([m.t.expand(x.shape[0], -1, -1), x @ m.w], 1), w=(8, 8), t=(1, 1, 8))
    drawn = of(model, torch.randn(4, 3, 8)).parameters["t"]
    assert (drawn.draw, drawn.kind) == ("normal", "embedding")


def test_values_inside_a_region_without_gradients_are_known() -> None:
    """As transformers computes the angles of rotated halves: the whole is measured with them."""

    def rotated(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * torch.ones(8)
            sine, cosine = angle.sin(), angle.cos()
        h = x @ m.w
        a, b = h.chunk(2, -1)
        return h * cosine + torch.cat((-b, a), -1) * sine

    analysis = of(Of(rotated, w=(8, 8)), torch.randn(4, 16, 8))
    assert not analysis.skipped
    assert any("as one, by measurement" in why for why in analysis.reasons.values())
