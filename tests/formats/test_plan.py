"""The precision plan: lookup, round trips, and files that are none."""

import copy
import dataclasses
import json
import math
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from plimsoll.errors import ArgumentError, FormatError
from plimsoll.formats import BF16, E4M3, FP32, MXFP8_E4M3, ModulePlan, Plan
from plimsoll.intervals import Interval
from tests.support.cases import each

FULL = Plan(
    target="fp8",
    formats={"blocks.*.mlp": "e4m3", "blocks.*": "mxfp8_e4m3", "blocks.3.mlp": "FP32", "odd[0]": "e5m7"},
    default="bf16",
    source="runs/exp1",
    notes={"blocks.*": "nothing lost", "blocks.3.mlp": 'overflows: "7 %"\n\ttwice \\ \x00\x7f\u2028 é 𝄞'},
    backward={"blocks.*.mlp": "e5m2"},
    scale=2.0**-3,
    scales={"blocks.*.mlp": {"weights": 64.0, "gradients": 2.0**-126}, "odd[0]": {"activations": 2.0**127}},
    predicted={"blocks.*.mlp": {"weights": (0.0, 0.001, 0.1 + 0.2), "gradients": (1e-9, 0.5, 1.0)}},
    tolerance=0.02,
    remarks=("gradients were recorded in FP16", 'a "second" one, \x7f'),
    predicted_loss=Interval(low=1e-7, estimate=0.1 + 0.2, high=2.0),
    increases={"blocks.*.mlp": (0.1 + 0.2, 0.0), "odd[0]": (0.0, 1e-300)},
    cost=0.515625,
    costs="h100",
    budget=2.5,
)


def test_exact_names_come_first_then_globs_in_order_then_the_default():
    found = [FULL.format_for(name) for name in ("blocks.3.mlp", "blocks.4.mlp", "blocks.4.mlp.2", "blocks.4", "head")]
    assert found == [FP32, E4M3, MXFP8_E4M3, MXFP8_E4M3, BF16]
    assert FULL.format_for("odd[0]").name == "e5m7"  # as a glob it would match odd0 only
    assert FULL.format_for("odd0").name == "e5m7"
    assert FULL.format_for("Blocks.4") is BF16
    assert dataclasses.replace(FULL, default=None).format_for("head") is None


def test_every_field_survives_the_file(tmp_path):
    path = tmp_path / "plan.toml"
    FULL.save(path)
    loaded = Plan.load(path)
    assert loaded == FULL
    assert list(loaded.formats) == list(FULL.formats)
    assert [item.name for item in tmp_path.iterdir()] == ["plan.toml"]
    for field in dataclasses.fields(Plan):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        assert required or getattr(FULL, field.name) != Plan(target="x", formats={}).__getattribute__(field.name)


def test_numbers_of_numpy_survive_the_file(tmp_path):
    tenth = np.float64(0.1)
    plan = Plan(
        target="fp8",
        formats={"a": "e4m3"},
        tolerance=tenth,
        cost=tenth,
        budget=tenth,
        predicted={"a": {"weights": (tenth, tenth, tenth)}},
        predicted_loss=Interval(low=tenth, estimate=tenth, high=tenth),
        increases={"a": (tenth, tenth)},
    )
    plan.save(tmp_path / "plan.toml")
    assert Plan.load(tmp_path / "plan.toml") == plan


def test_a_plan_of_nothing_survives_too(tmp_path):
    plan = Plan(target="fp16", formats={})
    plan.save(str(tmp_path / "plan.toml"))
    assert Plan.load(str(tmp_path / "plan.toml")) == plan


def test_saving_again_replaces_the_file(tmp_path):
    path = tmp_path / "plan.toml"
    FULL.save(path)
    Plan(target="fp16", formats={}).save(path)
    assert Plan.load(path).target == "fp16"


text = st.text(st.characters(codec="utf-8"), max_size=20)


@given(
    target=text,
    formats=st.dictionaries(text, st.sampled_from(["e4m3", "BF16", "nvfp4"])),
    default=st.none() | st.just("fp32"),
    source=st.none() | text,
    notes=st.dictionaries(text, text),
    remarks=st.lists(text).map(tuple),
    power=st.none() | st.integers(-126, 127),
    loss=st.lists(st.floats(0, 1), min_size=3, max_size=3).map(sorted).map(tuple),
)
def test_any_plan_survives_the_file(tmp_path_factory, target, formats, default, source, notes, remarks, power, loss):
    plan = Plan(
        target=target,
        formats=formats,
        default=default,
        source=source,
        notes=notes,
        remarks=remarks,
        scale=None if power is None else 2.0**power,
        predicted={name: {"weights": loss} for name in formats},
        scales={name: {"weights": 2.0 ** (power or 0)} for name, fmt in formats.items() if fmt != "nvfp4"},
    )
    path = tmp_path_factory.mktemp("plan") / "plan.toml"
    plan.save(path)
    loaded = Plan.load(path)
    assert loaded == plan
    assert list(loaded.formats.items()) == list(formats.items())


def test_copies_pickles_and_hashes():
    for other in (copy.deepcopy(FULL), _pickled(FULL), dataclasses.replace(FULL)):
        assert other == FULL
        assert hash(other) == hash(FULL)
    with pytest.raises(dataclasses.FrozenInstanceError):
        FULL.target = "fp16"


def test_a_plan_by_hand_needs_target_and_formats_only(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text('# mine\ntarget = "fp8"\n[formats]\n"head" = "bf16"  # never fp8\nbody = \'e4m3\'\n')
    assert Plan.load(path) == Plan(target="fp8", formats={"head": "bf16", "body": "e4m3"})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"target = ", r"Plan\.load: expected a TOML file; got .*plan\.toml"),
        (b"\xff\xfe", r"expected a TOML file; got .*plan\.toml.*decode"),
        (b"", r"expected the fields target and formats \(missing formats, target\)"),
        (b'target = "fp8"', r"\(missing formats\)"),
        (b'target = "fp8"\nformats = "e4m3"', r"increases and notes to be tables.*\(wrong: formats\)"),
        (b'[target]\na = "b"\n[formats]', r"\(wrong: target\)"),
        (
            b'target = "fp8"\ndefualt = "bf16"\n[formats]',
            r"the fields .*default.*\(found defualt\).* Correct it, or save",
        ),
        (b'schema = 2\ntarget = "fp8"\n[formats]', r"expected schema 1, .*\(found 2\)"),
        (b"target = 8\n[formats]", r"expected Unicode text throughout; got 'target' = 8"),
        (b'target = "fp8"\n[formats]\na = 4', r"expected Unicode text throughout; got 'a' = 4"),
        (b'target = "fp8"\n[formats.blocks]\nmlp = "e4m3"', r"got 'blocks' = \{'mlp': 'e4m3'\}"),
        (b'target = "fp8"\nremarks = "no"\n[formats]', r"remarks and predicted_loss lists.*\(wrong: remarks\)"),
        (b'target = "fp8"\nremarks = [1]\n[formats]', r"expected Unicode text throughout; got 'remarks' = 1"),
        (b'target = "fp8"\nscale = "2^x"\n[formats]', r"expected scale to be a power of two .*; got '2\^x'"),
        (b'target = "fp8"\nscale = "2^9999"\n[formats]', r"expected scale to be a power of two .*; got '2\^9999'"),
        (b'target = "fp8"\nscale = true\n[formats]', r"expected scale to be a power of two .*; got True"),
        (b'target = "fp8"\n[formats]\n[scales]\na = 4', r"expected scales of modules that formats names; got 'a'"),
        (
            b'target = "fp8"\n[formats]\na = "e4m3"\n[scales]\na = 4',
            r"expected scales of 'a' to be by weights, .*; got 4",
        ),
        (b'target = "x"\npredicted_loss = [0, 1]\n[formats]', r"an Interval, or three numbers in a file; got \[0, 1\]"),
        (b'target = "x"\npredicted_loss = [0, "b", 1]\n[formats]', r"predicted_loss to be 3 numbers of 0 or more"),
        (b'target = "x"\ncost = "little"\n[formats]', r"expected cost to be a number of 0 or more; got 'little'"),
        (
            b'target = "x"\n[formats]\na = "e4m3"\n[predicted]\na = { weights = 1 }',
            r"'a', weights, as three rising .*got 1",
        ),
    ],
)
def test_damaged_files_say_what_is_wrong(tmp_path, content, message):
    path = tmp_path / "plan.toml"
    path.write_bytes(content)
    with pytest.raises(ArgumentError, match=message):
        Plan.load(path)


def test_powers_of_two_may_be_written_as_such_or_as_numbers(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(
        'target = "fp8"\nscale = 1024\n[formats]\na = "e4m3"\n[scales]\na = { weights = "2^-7", gradients = 8.0 }\n'
    )
    plan = Plan.load(path)
    assert (plan.scale, plan.scales) == (1024.0, {"a": {"weights": 2.0**-7, "gradients": 8.0}})


def test_a_module_has_the_formats_and_scales_of_the_rule_that_holds():
    assert FULL.module("blocks.1.mlp") == ModulePlan(forward="e4m3", backward="e5m2", weights=64.0, gradients=2.0**-126)
    assert FULL.module("blocks.3.mlp") == ModulePlan(forward="fp32", backward="fp32")  # by its own name, not the glob
    assert FULL.module("odd[0]").scales == {"activations": 2.0**127}
    assert FULL.module("head") == ModulePlan(forward="bf16", backward="bf16")
    assert dataclasses.replace(FULL, default=None).module("head") is None
    assert Plan(target="x", formats={"a": "e4m3"}, backward={"a": "bf16"}).module("a").backward == "bf16"


def test_a_plan_says_what_it_predicts_and_an_old_file_predicts_nothing(tmp_path):
    assert FULL.consequence == (
        "Predicted: the loss rises by 30 % (under 0.01 % to 200 %, of 250 % allowed); the plan's products take "
        "52 % of BF16's time on h100."
    )
    narrow = dataclasses.replace(FULL, predicted_loss=Interval(low=1e-7, estimate=1e-6, high=2e-6), cost=1.0)
    for changes, said in (
        ({"costs": "bytes"}, "under 0.01 % (of 250 % allowed); the plan moves as many bytes as BF16."),
        ({"costs": "bytes", "cost": 0.5, "budget": None}, "under 0.01 %; the plan moves 50 % of BF16's bytes."),
        ({"costs": "h100", "budget": None}, "under 0.01 %; the plan's products take as long as in BF16 on h100."),
    ):
        assert dataclasses.replace(narrow, **changes).consequence == f"Predicted: the loss rises by {said}"
    assert FULL.consequence in str(FULL)
    path = tmp_path / "plan.toml"
    path.write_text('schema = 1\ntarget = "fp8"\ntolerance = 0.01\n[formats]\na = "e4m3"\n')
    old = Plan.load(path)
    assert (old.predicted_loss, old.cost, old.budget, old.consequence) == (None, None, None, None)


def test_a_plan_is_data():
    data = json.loads(json.dumps(FULL.to_dict(), allow_nan=False))
    assert data["modules"]["blocks.*.mlp"]["predicted"]["gradients"] == {"low": 1e-9, "estimate": 0.5, "high": 1.0}
    assert data["modules"]["blocks.3.mlp"]["note"].startswith("overflows") and data["scale"] == 0.125


@each(
    ("fields", "message"),
    [
        ({"formats": ["a"]}, r"expected formats to be a mapping by module; got formats=\['a'\]"),
        ({"scales": None}, "expected scales to be a mapping by module; got scales=None"),
        ({"remarks": "One."}, "expected remarks to be a tuple of sentences; got remarks='One.'"),
        ({"scale": 3.0}, r"expected scale to be a power of two from 2\^-126 to 2\^127; got 3\.0"),
        ({"scale": 2.0**128}, "expected scale to be a power of two"),
        ({"scale": -2.0}, "expected scale to be a power of two"),
        ({"scale": math.nan}, "expected scale to be a power of two"),
        ({"tolerance": 0.0}, "expected a tolerance above 0 and at most 1; got 0.0"),
        ({"tolerance": 1.5}, "expected a tolerance above 0 and at most 1; got 1.5"),
        ({"backward": {"b": "e5m2"}}, "expected backward of modules that formats names; got 'b'"),
        ({"predicted": {"b": {}}}, "expected predicted of modules that formats names; got 'b'"),
        ({"scales": {"a": {"forward": 2.0}}}, "expected scales of 'a' to be by weights, activations, gradients; got"),
        ({"scales": {"a": {"weights": 5}}}, "expected scales of 'a', weights to be a power of two"),
        ({"scales": {"m": {"weights": 2.0}}}, "one for the weights of 'm', which are in mxfp4, whose blocks have"),
        ({"scales": {"a": {"gradients": 2.0}}, "backward": {"a": "nvfp4"}}, "the gradients of 'a', which are in nvfp4"),
        ({"predicted": {"a": {"weights": (0.5, 0.1, 1.0)}}}, "as three rising fractions"),
        ({"predicted": {"a": {"weights": (0.1, 0.2)}}}, "as three rising fractions"),
        ({"predicted": {"a": {"weights": (0.1, 0.2, 1.1)}}}, "as three rising fractions"),
        ({"cost": -1.0}, r"expected cost to be a number of 0 or more; got -1\.0"),
        ({"budget": "much"}, "expected budget to be a number of 0 or more; got 'much'"),
        ({"predicted_loss": 0.1}, r"expected predicted_loss to be an Interval, or three numbers in a file; got 0\.1"),
        ({"predicted_loss": Interval(low=0.2, estimate=0.1, high=0.3)}, "expected predicted_loss in rising order"),
        ({"predicted_loss": Interval(low=0.0, estimate=0.1, high=math.nan)}, "predicted_loss to be 3 numbers of 0"),
        ({"increases": {"a": (0.1,)}}, "expected increases of 'a' to be 2 numbers of 0 or more"),
        ({"increases": {"b": (0.1, 0.2)}}, "expected increases of modules that formats names; got 'b'"),
    ],
)
def test_what_contradicts_itself_is_refused(fields, message):
    with pytest.raises(ArgumentError, match=f"Plan: .*{message}"):
        Plan(**({"target": "fp8", "formats": {"a": "e4m3", "m": "mxfp4"}} | fields))


def test_a_missing_file_is_pythons_own_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape("plan.toml")):
        Plan.load(tmp_path / "plan.toml")


@pytest.mark.parametrize("fields", [{"formats": {"head": "fp61"}}, {"formats": {}, "default": "fp61"}])
def test_unknown_formats_are_named_with_their_place(fields):
    with pytest.raises(
        FormatError, match=r"Plan: expected a format for '(head|default)'\. .*got 'fp61'\. Nearest: fp64, fp16"
    ):
        Plan(target="fp8", **fields)


@each(
    "fields",
    [
        {"target": "\ud800"},
        {"formats": {"\ud800": "e4m3"}},
        {"notes": {"a": "\ud800"}},
        {"target": None},
        {"source": 3},
        {"source": 0},
    ],
)
def test_what_no_file_could_hold_is_refused(fields):
    with pytest.raises(ArgumentError, match="Plan: expected Unicode text throughout; got"):
        Plan(**({"target": "fp8", "formats": {}} | fields))


def _pickled(record):
    return pickle.loads(pickle.dumps(record))


@pytest.mark.parametrize("name", ["plan.json", "plan.pdf", "plan.yaml"])
def test_a_plan_is_written_to_toml_only(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        ArgumentError, match=r"Plan.save: expected a file name that ends in .toml.*got .*Write to plan.toml"
    ):
        FULL.save(tmp_path / name)
    with pytest.raises(ArgumentError, match=r"Plan.save: expected the path of a file; got .*, a folder"):
        FULL.save(tmp_path)
    with pytest.raises(ArgumentError, match=r"Plan.save: expected a path in a folder that exists"):
        FULL.save(tmp_path / "none" / "plan.toml")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_path_of_a_plan_is_refused_in_words(tmp_path):
    for wrong in (None, 3, b"x", [], "", "a\0b"):
        with pytest.raises(ArgumentError, match=r"Plan\.load: expected the path of a plan's file.*; got "):
            Plan.load(wrong)
        with pytest.raises(ArgumentError, match=r"Plan\.save: expected the path of a file.*; got "):
            Plan(target="fp8", formats={}).save(wrong)
