"""Operation lists: data that does not change, names that exist, one list for each."""

import pickle

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from plimsoll import Policy
from plimsoll.emulate import Autocast
from plimsoll.emulate.casting import CATEGORIES, CUDA, OperationLists, operation_name
from plimsoll.emulate.dispatch.operation_kernels import overloads
from plimsoll.errors import ArgumentError
from tests.support.cases import each


def test_every_default_name_has_an_overload_that_can_be_seen() -> None:
    assert all(overloads(name) for name, _ in CUDA.rows())
    assert len(CUDA.rows()) == 113 and len({name for name, _ in CUDA.rows()}) == 113


@each(
    ("operation", "category"),
    [("linear", "low"), (torch.matmul, "low"), (torch.Tensor.matmul, "low"), (torch.Tensor.__matmul__, "low"),
     (F.softmax, "high"), ("aten::sum.dim_IntList", "high"), (F.grid_sample, "promote"), (F.relu, None),
     ("binary_cross_entropy", "banned"), (torch.Tensor.__pow__, "high"), (F.cross_entropy, None)],
)  # fmt: skip
def test_an_operation_is_found_by_name_function_or_method(operation: object, category: str | None) -> None:
    assert CUDA.of(operation) == category


def test_changes_make_new_lists_and_keep_an_operation_on_one() -> None:
    changed = CUDA.with_high("linear", torch.bmm).with_low("gelu").with_promote("add").with_banned("exp")
    assert [changed.of(x) for x in ("linear", "bmm", "gelu", "add", "exp")] == [
        "high",
        "high",
        "low",
        "promote",
        "banned",
    ]
    assert (CUDA.of("linear"), CUDA.of("gelu"), CUDA.of("exp")) == ("low", None, "high")
    assert changed.without("linear").of("linear") is None
    assert changed != CUDA and changed.with_low("linear", "bmm").with_high("exp").without("gelu", "add") == CUDA


def test_rows_say_everything() -> None:
    lists = OperationLists(low=frozenset(("mm",)), banned=frozenset(("exp", "addmm")))
    assert lists.rows() == [("mm", "low"), ("addmm", "banned"), ("exp", "banned")]
    rebuilt = {category: frozenset(n for n, c in CUDA.rows() if c == category) for category in CATEGORIES}
    assert OperationLists(**rebuilt) == CUDA
    assert repr(lists) == "<OperationLists low: 1, high: 0, promote: 0, banned: 2; rows() names them>"
    assert len(repr(Policy())) < 200


def test_lists_pickle_and_hash_by_value() -> None:
    assert pickle.loads(pickle.dumps(CUDA)) == CUDA and hash(CUDA.with_low("mm")) == hash(CUDA)


def test_names_are_normalised_on_entry() -> None:
    assert OperationLists(low=[torch.matmul, "aten::mm"]).low == frozenset(("matmul", "mm"))  # type: ignore[arg-type]


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(
        ArgumentError, match=r"with_high: expected an operation of torch; got 'gellu'. Did you mean gelu"
    ):
        CUDA.with_high("gellu")
    with pytest.raises(
        ArgumentError, match=r"OperationLists: expected an operation of torch; got 'sofmax'. Did you mean softmax"
    ):
        OperationLists(low=frozenset(("sofmax",)))
    with pytest.raises(ArgumentError, match=r"got 3. Names are those of torch.ops.aten"):
        operation_name(3, "test")
    with pytest.raises(ArgumentError, match=r"got 'add_'. Did you mean"):
        CUDA.with_low("add_")


def test_what_is_no_list_is_refused() -> None:
    with pytest.raises(ArgumentError, match="OperationLists: expected low to be an operation or several; got low=5"):
        OperationLists(low=5)
    with pytest.raises(ArgumentError, match="Autocast: expected lists to be OperationLists; got 'cuda'"):
        Autocast("cuda")
    assert OperationLists(low=torch.nn.functional.gelu).rows() == [("gelu", "low")]


def test_one_operation_on_two_lists_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"expected an operation on one list; got 'mm' on low and high"):
        OperationLists(low=frozenset(("mm",)), high=frozenset(("mm",)))
