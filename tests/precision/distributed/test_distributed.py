"""Two ranks train as one process does, skip and repeat together, and say where a wrapper contradicts a level."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cases import each
from tests.support.precision.ranks import scenarios
from tests.support.precision.ranks.launch import torchrun
from tests.support.precision.ranks.scenarios import Net, trained

# Each scenario: what one process does, and how near the weights come (16-bit gradients are rounded before their mean).
SAME: dict[str, tuple[Callable[[], Any], float]] = {
    "ddp_fp32": (lambda: trained(Net(), "fp32"), 1e-6),
    "ddp_amp": (lambda: trained(Net(), "amp-fp16"), 2e-3),
    "ddp_accumulates": (lambda: trained(Net(), "fp32", accumulate=3), 1e-6),
    "ddp_masters": (lambda: trained(Net(), "fp16-master"), 2e-3),
    "ddp_compact": (lambda: trained(Net(), "bf16-master"), 8e-3),
    "fsdp_fp32": (lambda: trained(Net(), "fp32"), 1e-6),
    "fsdp_amp": (lambda: trained(Net(), "amp-bf16"), 8e-3),
    "fsdp_accumulates": (lambda: trained(Net(), "fp32", accumulate=3), 1e-6),
    "fsdp_bf16": (lambda: trained(Net(), "bf16-master"), 8e-3),
    "fsdp_fp16": (lambda: trained(Net(), "fp16-master"), 2e-3),
    "ddp_fp8": (lambda: trained(Net(), "fp8-tensor", accumulate=2), 9e-3),
    "ddp_fp8_late": (lambda: trained(Net(), "fp8-tensor"), 9e-3),
    "fsdp_fp8": (lambda: trained(Net(), "fp8-tensor"), 9e-3),
    "fsdp_fp8_whole": (lambda: trained(Net(), "fp8-tensor", accumulate=2), 9e-3),
}
OTHERS = (
    "no_gradient_is_sent_before_the_last_micro_batch", "ddp_overflow", "fsdp_overflow", "one_ranks_loss_is_nan",
    "refusals", "fsdp_resumes",
)  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each scenario gave on each rank."""
    folder: Path = tmp_path_factory.mktemp("two")
    torchrun(2, folder, *SAME, *OTHERS)
    return {name: [torch.load(folder / f"{name}.{rank}.pt") for rank in (0, 1)] for name in (*SAME, *OTHERS)}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(one[name].equal(other[name]) for name in one)


@pytest.mark.parametrize("name", SAME)
def test_two_ranks_train_as_one_process_does(name: str, found: dict[str, list[Any]]) -> None:
    make, tolerance = SAME[name]
    expected, (first, second) = make(), found[name]
    assert equal(first["weights"], second["weights"])
    assert first["norms"] == second["norms"] == pytest.approx(expected["norms"], rel=max(tolerance * 5, 1e-5))
    assert first["stepped"] == expected["stepped"]
    for key, weight in expected["weights"].items():
        torch.testing.assert_close(first["weights"][key], weight, rtol=0, atol=tolerance)
    moved = max(float((Net().state_dict()[key] - weight).abs().max()) for key, weight in expected["weights"].items())
    assert moved > 4 * tolerance  # so that the comparison says something


def test_gradients_are_sent_once_a_step(found: dict[str, list[Any]]) -> None:
    first, second = found["no_gradient_is_sent_before_the_last_micro_batch"]
    assert not first["same"] and equal(first["weights"], second["weights"])


@pytest.mark.parametrize("name", ["ddp_overflow", "fsdp_overflow"])
def test_ranks_repeat_together(name: str, found: dict[str, list[Any]]) -> None:
    first, second = found[name]
    assert all(first["stepped"]) and first["retries"][1] > 0
    for key in ("stepped", "retries", "scale", "calls"):
        assert first[key] == second[key]
    assert equal(first["weights"], second["weights"])
    assert first["calls"] == 3 + sum(first["retries"])


def test_no_rank_repeats_where_one_has_no_finite_loss(found: dict[str, list[Any]]) -> None:
    assert found["one_ranks_loss_is_nan"] == [{"stepped": False, "retries": 0, "scale": 32768.0}] * 2


@each(
    ("case", "message"),
    [
        ("cast_under_ddp", "Prepare the module first, then set loop.model = DistributedDataParallel(loop.model)"),
        ("schedule_under_ddp", "expected bf16-kahan to come before DistributedDataParallel"),
        ("amp_over_policy", "expected fully_shard to leave the casting to amp-bf16; got a MixedPrecisionPolicy"),
        (
            "other_dtype",
            "fp16-master under fully_shard to match its mp_policy; got param_dtype torch.bfloat16",
        ),
        ("no_policy", "Shard with MixedPrecisionPolicy(param_dtype=torch.bfloat16)"),
        (
            "fp8_on_shards",
            "got one, which is sharded by itself. Call plimsoll.fp8.convert, then fully_shard, then prepare",
        ),
        ("pure", "Use fp16-master with MixedPrecisionPolicy(param_dtype=torch.float16)"),
    ],
)
def test_what_contradicts_a_level_is_refused(case: str, message: str, found: dict[str, list[Any]]) -> None:
    assert message in found["refusals"][0][case]


def test_shards_resume_bit_for_bit(found: dict[str, list[Any]]) -> None:
    assert found["fsdp_resumes"] == [{"same": True}] * 2


def test_every_scenario_is_tested() -> None:
    assert all(callable(getattr(scenarios, name)) for name in (*SAME, *OTHERS))
