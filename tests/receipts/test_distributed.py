"""Reductions across ranks, in DDP, `fully_shard` and tensor parallel, held against what was configured."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import processes
from tests.support.versions import is_older

SCRIPT = Path(__file__).parents[1] / "support" / "receipts" / "sharded.py"


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    result = processes.python("-W", "ignore", SCRIPT, cwd=SCRIPT.parents[3])
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_steps_that_do_as_configured(found: dict[str, dict[str, Any]]):
    for name in ("ddp", "fully_sharded", "fully_sharded_and_reduced_in_fp32", "tensor_parallel"):
        assert found[name]["deviations"] == [], name
    assert found["ddp"]["reductions"] == [["backward", "", "fp32"]]
    fmt = "bf16" if is_older("2.15") else "fp32"  # of gradients whose policy says nothing of it
    assert found["fully_sharded"]["reductions"] == [["backward", "0", fmt], ["backward", "1", fmt]]
    both = [["backward", "0", "fp32"], ["backward", "1", "fp32"]]
    assert found["fully_sharded_and_reduced_in_fp32"]["reductions"] == both
    said = {
        name: "fully_shard adds up gradients across ranks in bf16" in str(case["notes"]) for name, case in found.items()
    }
    assert [name for name, is_said in said.items() if is_said] == ["fully_sharded"] * is_older("2.15")
    assert ["forward", "down", "bf16"] in found["tensor_parallel"]["reductions"]


def test_hooks_that_compress_gradients(found: dict[str, dict[str, Any]]):
    assert found["ddp_with_a_hook_in_bf16"]["deviations"] == [["gradient-reduction", None, "bf16"]]
    assert found["ddp_with_torchs_own_hook_in_fp16"]["deviations"] == [["gradient-reduction", None, "fp16"]]


def test_a_reduction_that_the_policy_does_not_reach(found: dict[str, dict[str, Any]]):
    case = found["sharded_and_tensor_parallel"]
    narrow = [["gradient-reduction", "0", "bf16"], ["gradient-reduction", "1", "bf16"]]
    assert sorted(case["deviations"]) == (narrow if is_older("2.15") else [])
    assert all("tensor-parallel mesh" in advice for advice in case["advice"])


def test_each_operation_of_a_sharded_tensor_counts_once(found: dict[str, dict[str, Any]]):
    for name in ("ddp", "tensor_parallel"):  # DTensor asks for shapes too, on tensors that are none
        assert found[name]["products"] == {"forward": 2, "backward": 4}
    assert found["tensor_parallel"]["weights"] == 4 * (16 + 2 * 16 * 16)  # this rank's half, and the whole norm


def test_a_cast_of_a_sharded_tensor_is_the_scripts(found: dict[str, dict[str, Any]]):
    assert found["tensor_parallel_with_a_round_trip"]["deviations"] == [["round-trip", "0", "fp32 -> bf16 -> fp32"]]
