"""The small BERT: tokens, questions and their scores against examples made by hand, both models, and the claims."""

import dataclasses
import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from plimsoll.errors import ArgumentError
from plimsoll.runs import Run
from plimsoll_lab import Bench
from plimsoll_lab.bench import Silent
from plimsoll_lab.experiments.bert.data import (
    LENGTH,
    LONGEST_ANSWER,
    MASK,
    PREDICTIONS,
    SPECIAL,
    batch_of,
    best_spans,
    corpus,
    exact,
    f1,
    masked_batch,
    questions,
    questions_of,
    source,
    source_of,
    vocabulary_of,
    words,
)
from plimsoll_lab.experiments.bert.experiment import (
    KINDS,
    PHASES,
    Job,
    Kind,
    Score,
    Setup,
    behind,
    claims,
    from_task,
    jobs_of,
    judged,
    make_model,
    make_optimizer,
    nats_over,
    scored,
    scores,
    setup_for,
    to_task,
    train,
)
from tests.support.cases import each

SMALL = Setup(masked_steps=6, span_steps=4, masked_batch=4, span_batch=4, accumulate=2**16, width=16, layers=1, every=2)
BY_NAME = {kind.name: kind for kind in KINDS}


def job_of(name: str, folder: Path, seed: int = 0) -> Job:
    folder.mkdir(parents=True)
    return Job(kind=BY_NAME[name], seed=seed, folder=folder)


@pytest.fixture(scope="module", autouse=True)
def few_questions() -> "object":
    """Those of the held-out text for both trainings: the whole text takes seconds to look through."""
    with pytest.MonkeyPatch.context() as patch:
        asked = questions(held_out=True)
        patch.setattr("plimsoll_lab.experiments.bert.data.questions", lambda *, held_out: asked)
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    folder = tmp_path_factory.mktemp("bert")
    jobs = {name: job_of(name, folder / f"{name}-0") for name in ("fp32", "fp16", "unit-fp8")}
    for job in jobs.values():
        train(job, SMALL, "cpu")
    return jobs


# -- tokens ------------------------------------------------------------------------------------------------------------


def test_the_vocabulary_is_characters_and_then_frequent_words() -> None:
    found = vocabulary_of(words("beta alpha beta alpha gamma zeta"), len(SPECIAL) + 95 + 2)
    assert found.tokens[-3:] == ("~", "alpha", "beta")  # of equally frequent ones, by the alphabet
    assert [found.tokens[number] for number in found.cut("alphabet")] == ["alpha", "b", "e", "t"]


def test_every_word_has_numbers_that_spell_it() -> None:
    text, vocabulary = source(held_out=True), corpus().vocabulary
    assert text.starts[-1] == len(text.numbers) and len(text.starts) == len(text.words) + 1
    for place in range(0, len(text.words), 97):
        numbers = text.numbers[text.starts[place] : text.starts[place + 1]]
        assert "".join(vocabulary.tokens[number] for number in numbers) == text.words[place]
    assert all(place == 0 or text.words[place - 1] == "\n" for place in text.lines)


def test_masked_tokens_are_those_of_bert() -> None:
    made = masked_batch(1, 2, 400)
    shown = made.tokens.flatten()[made.places]
    assert made.places.view(400, PREDICTIONS).div(LENGTH, rounding_mode="floor").eq(torch.arange(400)[:, None]).all()
    masked, kept = (shown == MASK).float().mean().item(), (shown == made.targets).float().mean().item()
    error = math.sqrt(0.8 * 0.2 / len(shown))
    assert abs(masked - 0.8) < 4 * error and abs(kept - 0.1) < 4 * error
    assert made.tokens.eq(MASK).sum() == shown.eq(MASK).sum() and not made.targets.eq(MASK).any()
    again, other = masked_batch(1, 2, 400), masked_batch(1, 3, 400)
    assert torch.equal(made.tokens, again.tokens) and not torch.equal(made.tokens, other.tokens)


# -- questions ---------------------------------------------------------------------------------------------------------

FILL = "\n" + " ".join(["."] * 2 * LENGTH)


@each(
    ("text", "answers"),
    [
        ("def go(a):\n return a + b", {"def": "go", "return": "a + b"}),
        ("for i, j in x:\n if i in j:", {"for": "i , j", "if": "i in j"}),
        ("class A:\n import os as o\n x = 12", {"class": "A", "import": "os", "0": "12"}),
        ("x = 'a, b' if y: raise E()", {"'": "a , b", "if": "y", "raise": "E"}),
        ("def f(): def g(): return a\n if b:", {"return": "a", "if": "b"}),  # two names are no answer
        ("x = 'a' + 'b'; y = 1; class C", {"0": "1", "class": "C"}),  # and neither are two strings
        ("def f(): pass", {}),  # one thing alone would need no question
    ],
)
def test_a_piece_is_asked_for_what_it_holds_once(text: str, answers: dict[str, str]) -> None:
    vocabulary = corpus().vocabulary
    asked = [
        q for q in questions_of(source_of(words(text + FILL), vocabulary)) if q.tokens[3] != vocabulary.numbers["."]
    ]
    first_line = source_of(words(text), vocabulary).numbers[0]
    spelled = {
        vocabulary.tokens[q.tokens[1]]: "".join(vocabulary.tokens[n] for n in q.tokens[q.first : q.last + 1])
        for q in asked
        if q.tokens[3] == first_line
    }
    assert spelled == {kind: answer.replace(" ", "") for kind, answer in answers.items()}
    assert all(len(q.tokens) == LENGTH for q in asked)


def test_held_out_questions_fit_and_are_of_every_kind() -> None:
    asked = questions(held_out=True)
    assert len(asked) > 300 and len({q.tokens[1] for q in asked}) == 10
    assert all(3 <= q.first <= q.last < LENGTH and q.last - q.first < LONGEST_ANSWER for q in asked)
    made = batch_of(asked[:3])
    assert made.segments.sum(dim=1).tolist() == [LENGTH - 3] * 3
    assert made.ends.tolist() == [[q.first, q.last] for q in asked[:3]]


# -- scores ------------------------------------------------------------------------------------------------------------


@each(
    ("predicted", "truth", "value"),
    [
        ("a b c", "a b c", 1.0),
        ("c b a", "a b c", 1.0),  # in any order
        ("a b", "a b c d", 2 / 3),  # precision 1, recall 1/2
        ("a a a b", "a c", 1 / 3),  # of three only one counts: precision 1/4, recall 1/2
        ("x", "y", 0.0),
        ("", "a", 0.0),
        ("a", "", 0.0),
        ("", "", 1.0),  # SQuAD 2: no answer, and none given
    ],
)
def test_f1_of_examples_made_by_hand(predicted: str, truth: str, value: float) -> None:
    assert f1(_numbers(predicted), _numbers(truth)) == pytest.approx(value)
    assert exact(_numbers(predicted), _numbers(truth)) == (predicted == truth)


def test_f1_is_that_of_squad() -> None:
    """Its definition by precision and recall, over words that its normalisation leaves as they are."""
    chance = random.Random(0)
    for _ in range(300):
        predicted, truth = ([chance.choice("bcdef") for _ in range(chance.randint(1, 6))] for _ in range(2))
        common = Counter(predicted) & Counter(truth)
        same = sum(common.values())
        precision, recall = same / len(predicted), same / len(truth)
        expected = 0.0 if same == 0 else 2 * precision * recall / (precision + recall)
        assert f1(_numbers(" ".join(predicted)), _numbers(" ".join(truth))) == pytest.approx(expected)


def test_the_best_span_is_that_of_a_search() -> None:
    generator = torch.Generator().manual_seed(0)
    first, last = (torch.randn(20, LENGTH, generator=generator) for _ in range(2))
    segments = torch.ones(20, LENGTH, dtype=torch.long)
    segments[:, :3] = 0
    first[:, 0] = last[:, 1] = 100.0  # a question is no answer
    begins, ends = best_spans(first, last, segments)
    for row in range(20):
        allowed = [(i, j) for i in range(3, LENGTH) for j in range(i, min(i + LONGEST_ANSWER, LENGTH))]
        best = max(allowed, key=lambda span: first[row, span[0]].double() + last[row, span[1]].double())
        assert (begins[row].item(), ends[row].item()) == best
    nothing = torch.full((1, LENGTH), torch.nan)
    assert [end.item() for end in best_spans(nothing, nothing, segments[:1])] == [3, 3]


def test_answers_are_scored_in_per_cent() -> None:
    asked = questions(held_out=True)[:4]
    right = [(q.first, q.last) for q in asked]
    assert scored(asked, right) == (100.0, 100.0)
    assert scored(asked, [(1, 1), *right[1:]])[0] == 75.0


def _numbers(spelled: str) -> Sequence[int]:
    return [ord(word) for word in spelled.split()]


# -- the models --------------------------------------------------------------------------------------------------------


def test_the_converted_models_have_the_plain_ones_parameters(tmp_path: Path) -> None:
    for phase in PHASES:
        plain, scaled = (
            {
                n: tuple(x.shape)
                for n, x in make_model(phase, Job(kind=BY_NAME[k], seed=0, folder=tmp_path), SMALL).state_dict().items()
            }
            for k in ("fp32", "unit-fp32")
        )
        assert plain == scaled


def test_only_the_first_trainings_plain_loss_is_divided(tmp_path: Path) -> None:
    model = make_model("masked", Job(kind=BY_NAME["fp32"], seed=0, folder=tmp_path), SMALL)
    epsilons = [make_optimizer(model, phase, "plain", SMALL).param_groups[0]["eps"] for phase in PHASES]
    assert epsilons == [1e-8 / 2**16, 1e-8]


# -- the trainings -----------------------------------------------------------------------------------------------------


def test_trainings_begin_alike_and_the_second_takes_over_the_first(trained: dict[str, Job]) -> None:
    first = {name: Run(job.folder / "masked").scalars("nats")[1][0] for name, job in trained.items()}
    assert first["fp16"] == pytest.approx(first["fp32"], rel=2e-3) and first["fp16"] != first["fp32"]
    end = Run(trained["fp32"].folder / "masked").spectrum("weights", "body.words.weight", SMALL.masked_steps - 2)
    begin = Run(trained["fp32"].folder / "spans").spectrum("weights", "body.words.weight", 0)
    assert begin.rms == pytest.approx(end.rms, rel=1e-3)


def test_fp16_loses_its_gradients_and_unit_scaled_fp8_does_not(trained: dict[str, Job]) -> None:
    found = scores(list(trained.values()))
    numbers = {name: judged(job.kind, job, "masked", found).numbers for name, job in trained.items()}
    assert numbers["fp16"]["lost_after"] > 0.5 > 0.01 > numbers["unit-fp8"]["lost_after"]  # noqa: PLR0133
    spans = judged(trained["fp16"].kind, trained["fp16"], "spans", found)
    assert spans.run.name == "spans" and spans.numbers["lost_after"] < 0.2
    assert numbers["fp32"]["f1"] == found["fp32"][0].f1 and numbers["fp32"]["behind_fp32"] == 0.0


def test_scores_are_of_answers_and_runs(trained: dict[str, Job]) -> None:
    job, asked = trained["fp32"], questions(held_out=True)
    given = json.loads((job.folder / "answers.json").read_text("utf-8"))
    (score,) = scores([job])["fp32"]
    assert (score.exact, score.f1) == scored(asked, given)
    assert score.nats == pytest.approx(Run(job.folder / "masked").scalars("nats")[1][-1])


# -- the claims --------------------------------------------------------------------------------------------------------

NUMBERS = {"fp16": {"lost_after": 0.9}, "unit-fp16": {"lost_after": 0.001}}


def flat(**others: Score) -> dict[str, list[Score]]:
    """Scores of two seeds, all alike, but that FP16 with no loss scale has learnt less of masked tokens."""
    usual = {kind.name: Score(exact=40.0, f1=50.0, nats=6.0 if kind.name == "fp16" else 5.0) for kind in KINDS}
    return {name: [score, score] for name, score in (usual | others).items()}


def test_claims_hold_where_all_is_as_published() -> None:
    found = claims(flat(), NUMBERS)
    assert len({claim.id for claim in found}) == len(found)
    assert [claim.id for claim in found if not claim.holds] == []


@each(
    ("kind", "score", "breaks"),
    [
        ("fp32", Score(exact=1.0, f1=30.0, nats=5.0), {"fp32-answers"}),
        ("fp16", Score(exact=40.0, f1=50.0, nats=5.1), {"fp16-fails"}),
        ("fp16-scaled", Score(exact=40.0, f1=46.0, nats=5.2), {"scaled-masked", "scaled-answers"}),
        (
            "unit-fp16",
            Score(exact=40.0, f1=46.0, nats=5.2),
            {"unit-fp16-masked", "unit-fp16-answers", "unit-fp16-plain"},
        ),
        ("unit-fp8", Score(exact=40.0, f1=46.0, nats=5.2), {"unit-fp8-masked", "unit-fp8-answers", "unit-fp8-plain"}),
        ("unit-fp8-fnuz", Score(exact=1.0, f1=1.0, nats=math.inf), {"unit-fp8-fnuz-masked", "unit-fp8-fnuz-answers"}),
        ("unit-fp32", Score(exact=40.0, f1=46.0, nats=5.0), {"unit-fp32-plain"}),
    ],
)
def test_each_claim_of_scores_can_fail(kind: str, score: Score, breaks: set[str]) -> None:
    found = claims(flat(**{kind: score}), NUMBERS)
    assert {claim.id for claim in found if not claim.holds} == breaks


@pytest.mark.parametrize(
    ("kind", "share", "breaks"), [("fp16", 0.4, "fp16-underflow"), ("unit-fp16", 0.02, "unit-nothing-lost")]
)
def test_each_claim_of_gradients_can_fail(kind: str, share: float, breaks: str) -> None:
    found = claims(flat(), NUMBERS | {kind: {"lost_after": share}})
    assert {claim.id for claim in found if not claim.holds} == {breaks}


def test_scores_are_means_over_seeds() -> None:
    found = {"a": [Score(exact=0, f1=10, nats=2), Score(exact=0, f1=20, nats=4)], "b": [Score(exact=0, f1=40, nats=1)]}
    assert (behind(found, "a", "b"), nats_over(found, "a", "b")) == (25.0, 3.0)


# -- sizes and tasks ---------------------------------------------------------------------------------------------------


def test_every_kind_has_its_seeds(tmp_path: Path) -> None:
    bench = Bench(runs=tmp_path, seed=5, device="cpu", steps=None, full=False, progress=Silent())
    jobs = jobs_of(bench, Setup())
    assert {(job.kind.name, job.seed) for job in jobs} == {(kind.name, seed) for kind in KINDS for seed in (5, 6)}
    assert len({job.folder for job in jobs}) == len(jobs)


def test_sizes_for_other_lengths() -> None:
    assert setup_for(None, full=False) == Setup()
    assert (setup_for(40, full=False).masked_steps, setup_for(40, full=False).span_steps) == (10, 40)
    for full in (False, True):
        made = setup_for(None, full=full)
        assert made.masked_batch * made.accumulate == 65_536
    with pytest.raises(ArgumentError, match="lab bert: expected 20 steps or more, .* got 19. Use 240."):
        setup_for(19, full=False)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_job_comes_through_a_line_whole(kind: Kind, tmp_path: Path) -> None:
    job = Job(kind=kind, seed=4, folder=tmp_path)
    setup = dataclasses.replace(setup_for(70, full=True), unit_span_rate=0.5)
    assert from_task(json.loads(json.dumps(to_task(job, setup, "cuda")))) == (job, setup, "cuda")
