"""The registry of rules: every member in the class, no rule listed elsewhere, and rules of installed packages."""

import ast
import inspect
import json
import re
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from plimsoll.cli.entry_point import app as commands
from plimsoll.diagnosis import RULES, EvidenceItem, Finding, Rule, Spot, View, diagnose
from plimsoll.diagnosis.rules import registry
from plimsoll.errors import ArgumentError
from plimsoll.report import FIGURES, figure_for, html, markdown, summary
from plimsoll.report.live.server.app import app
from plimsoll.report.verdicts import summary_text
from tests.support.cases import each
from tests.support.diagnosis.stories import SOUND, make_story

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "plimsoll"
GUIDE = ROOT / "docs" / "reference" / "diagnosis.md"
IDS = {rule.id for rule in RULES}


def a_finding(rule: Rule, severity: str = "alarm", **more: object) -> Finding:
    fields = {"since_step": 3, "until_step": 5, "meaning": "", "advice": "", "figure": rule.figure, **more}
    return Finding(rule=rule.id, severity=severity, **fields)  # type: ignore[arg-type]


# -- what a class declares


@each("rule", RULES, ids=lambda rule: rule.id)
def test_a_rule_declares_all_members(rule: Rule) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", rule.id)
    assert type(rule).__doc__ and rule.says and not rule.says.endswith(".")
    assert rule.meaning.endswith(".") and rule.advice.endswith(".")
    assert "`" not in f"{rule.says}{rule.meaning}{rule.advice}", "shown as it is in terminals and on pages"
    assert rule.figure in FIGURES
    assert set(rule.explained_by) <= IDS - {rule.id}
    assert type(rule).phrase is not Rule.phrase, "a verdict has words for every rule"
    assert all(isinstance(item, EvidenceItem) for item in (*rule.items.values(), rule.location_item))
    arguments = inspect.signature(FIGURES[rule.figure]).parameters
    evidence = {"scale": 1.0, "format": "e4m3", "epsilon": 1e-8}
    assert set(rule.figure_arguments(a_finding(rule, evidence=evidence))) <= set(arguments)
    assert isinstance(rule.is_fatal(a_finding(rule), 5), bool)
    assert isinstance(rule.needs_other_scale(a_finding(rule)), bool)


def test_what_the_words_of_a_rule_come_from_is_in_its_evidence(tmp_path: Path) -> None:
    """A declared item that no finding has is a spelling mistake: so its label would never be shown."""
    source = {path: path.read_text("utf-8") for path in (SOURCE / "diagnosis" / "rules").rglob("*.py")}
    for rule in RULES:
        text = source[Path(inspect.getfile(type(rule)))]
        assert all(text.count(f'"{name}"') > 1 for name in rule.items), rule.id


def test_each_fact_of_the_wiring_is_recorded_and_read() -> None:
    """A fact's name is written where it is recorded and where a rule reads it: a spelling mistake loses the finding."""
    recorded, looked_up, read = set[str](), set[str](), set[str]()
    for path in (SOURCE / "watch").rglob("*.py"):
        for call in calls_in(path, "record", "record_if", "say", "Fact", "_fact", "_record"):
            recorded |= texts(call.args[:1]) | texts(word.value for word in call.keywords if word.arg == "fact")
    for path in (SOURCE / "diagnosis").rglob("*.py"):
        read |= texts(ast.walk(ast.parse(path.read_text("utf-8"))))
        for call in calls_in(path, "facts", "first_fact", "_Mishandled"):
            looked_up |= texts(call.args[1:2]) | texts(word.value for word in call.keywords if word.arg == "fact")
    facts = recorded - {"wiring"}
    assert len(looked_up) > 30 and not looked_up - facts, "read, and recorded by no check"
    of_wiring = set[str]()
    for path in (SOURCE / "watch" / "steps" / "wiring").glob("*.py"):
        for call in calls_in(path, "record", "record_if", "Fact", "_fact", "_record"):
            of_wiring |= texts(call.args[:1])
    assert len(of_wiring) > 40 and not of_wiring - read, "recorded, and read by no rule"


def calls_in(path: Path, *names: str) -> Iterator[ast.Call]:
    """Calls of functions or methods with these names."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in names:
            yield node


def texts(nodes: Iterable[ast.AST]) -> set[str]:
    """Those of the nodes that are literal strings."""
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_no_rule_is_named_outside_its_module() -> None:
    homes = {rule.id: Path(inspect.getfile(type(rule))) for rule in RULES}
    named: list[str] = []
    for path in sorted(SOURCE.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
        compared = [
            node for node in nodes if isinstance(node, ast.Compare) and ast.unparse(node.left).endswith(".rule")
        ]
        suspects = {part for node in compared for part in ast.walk(node)}
        # "nonfinite" is also a scalar of a run and a statistic, so only comparisons with a finding's rule count.
        suspects |= {node for node in nodes if isinstance(node, ast.Constant) and node.value != "nonfinite"}
        found = {node.value for node in suspects if isinstance(node, ast.Constant) and node.value in homes}
        named += [f"{path.relative_to(SOURCE)} {name}" for name in found if homes[name] != path]
    lines = [line for path in SOURCE.rglob("*.js") for line in path.read_text("utf-8").splitlines()]
    named += [line for line in lines for name in homes if f'"{name}"' in line and not line.startswith("/")]
    assert named == []


def test_a_rule_given_as_an_object_has_its_words(tmp_path: Path) -> None:
    namespace: dict[str, object] = {}
    exec(guide()[0], namespace)
    rule = namespace["LossHigh"]()  # type: ignore[operator]
    path = SOUND.write(tmp_path / "run", until=20)
    made = summary(path, diagnose(path, rules=[rule]))
    assert made.verdict == "Warning: the loss was 4 at step 0; check the data."
    assert summary_text.evidence(made.findings[0]) == [("Highest loss", "4")]
    no_figure = [replace(finding, figure="pie") for finding in made.findings]
    assert made.verdict in html(path, tmp_path / "report.html", findings=no_figure).read_text("utf-8")


def test_units_write_the_evidence() -> None:
    class Odd(Rule):
        id = "odd"
        items = {  # noqa: RUF012  (`Rule` declares the ClassVar)
            "part": EvidenceItem("Part", "share"),
            "scale_now": EvidenceItem(unit="scale"),
            "exponent": EvidenceItem(unit="exponent"),
            "where": EvidenceItem(unit="location"),
            "place": EvidenceItem(unit="place"),
            "none": EvidenceItem(hide_zero=True),
        }
        location_item = EvidenceItem("Part", "share")

        def findings(self, view: View) -> Iterator[Finding]:
            yield from ()

    registry.remember(Odd())
    evidence = {
        "part": 0.5, "scale_now": 8.0, "exponent": -3.0, "where": "a.weight", "place": "gradients a", "none": 0, "n": 2,
    }  # fmt: skip
    spots = (Spot(name="a.weight", since_step=0, value=0.25),)
    finding = Finding(rule="odd", severity="info", since_step=0, until_step=0, meaning="", advice="", figure="record",
                      collection="gradients", evidence=evidence, where=("a.weight",), spots=spots)  # fmt: skip
    assert summary_text.evidence(finding) == [
        ("Part", "50 %"), ("Scale now", "2^3"), ("Exponent", "2^-3"), ("Where", "a"),
        ("Place", "parameter gradients of a"), ("N", "2"),
    ]  # fmt: skip
    assert (summary_text.spot_heading(finding), summary_text.spot_value(finding, 0.25)) == ("Part", "25 %")


# -- rules of installed packages


def guide() -> tuple[str, str]:
    """The rule of the guide, and the entry point that offers it."""
    section = GUIDE.read_text("utf-8").partition("## A custom rule")[2]
    source, declared = (re.findall(rf"```{kind}\n(.*?)```", section, re.DOTALL)[0] for kind in ("python", "toml"))
    ((name, target),) = tomllib.loads(declared)["project"]["entry-points"][registry.GROUP].items()
    return source, f"{name} = {target}"


Install = Callable[[str, str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs packages with one rule each: metadata as an installer writes it, and a module."""
    site = tmp_path / "site"
    monkeypatch.syspath_prepend(site)
    registry.packaged_rules.cache_clear()
    monkeypatch.setattr(registry, "_reported", set[str]())
    monkeypatch.setattr(registry, "_custom", dict[str, Rule]())

    def add(package: str, entry: str, source: str) -> None:
        metadata = site / f"{package}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{entry}\n")
        (site / f"{package}.py").write_text(source)
        packages.append(package)

    packages: list[str] = []
    yield add
    registry.packaged_rules.cache_clear()
    for package in packages:
        sys.modules.pop(package, None)


def test_the_packaged_rule_of_the_docs_is_on_every_surface(install: Install, tmp_path: Path) -> None:
    source, entry = guide()
    install("plimsoll_loss", entry, source)
    path = make_story(loss=lambda step: 4.0).write(tmp_path / "runs" / "run", until=40)
    found = diagnose(path)
    assert [f.rule for f in found] == ["loss-high"]
    assert diagnose(path, rules=["underflow-*"]) == diagnose(path, thresholds={"loss-high.level": 9.0}) == []
    sentence = "Warning: the loss was 4 at step 0; check the data."
    assert summary(path).verdict == sentence and sentence in markdown(path)
    assert figure_for(path, found[0]).data
    page = html(path, tmp_path / "report.html").read_text("utf-8")
    assert sentence in page and "Highest loss" in page

    run = CliRunner().invoke
    assert sentence in run(commands, ["check", str(path)]).output
    assert "Highest loss: 4" in run(commands, ["check", str(path), "--select", "loss-high"]).output
    assert "healthy" in run(commands, ["check", str(path), "--set", "loss-high.level=5"]).output.lower()
    listed = json.loads(run(commands, ["check", "--rules", "--json"]).output)
    assert [each["rule"] for each in listed] == [rule.id for rule in RULES] + ["loss-high"]

    with TestClient(app(tmp_path / "runs"), base_url="http://localhost:8642") as client:
        judged = client.get("/api/runs/run").json()["summary"]
        (on_page,) = judged["findings"]
        assert on_page["shown"]["evidence"] == [["Highest loss", "4"]]
        assert on_page["shown"]["explanation"] == "The loss is above a level."
        assert judged["verdict"] == sentence
        assert client.get("/api/runs/run/figure/loss_and_scale", params={"finding": "0"}).json()["figure"]["data"]


def test_a_package_is_loaded_only_when_its_rule_may_be_meant(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("plimsoll_loss", guide()[1], guide()[0])
    path = SOUND.write(tmp_path / "run", until=20)
    diagnose(path, rules=["nonfinite", "dead-layer"], thresholds={"scale-low.lost": 0.5})
    verdict = summary(path, [a_finding(RULES[0], where=("w",)), a_finding(RULES[1])]).verdict
    assert "w" in verdict and "plimsoll_loss" not in sys.modules
    monkeypatch.setattr(registry, "entry_points", None)  # looked up once in a process
    with pytest.raises(TypeError):
        diagnose(path)


BROKEN = {
    "half": ("half = half:Half", "import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    "gone": ("gone = gone:Gone", "", "AttributeError: .*Gone"),
    "json": ("text = json_rule:dumps", "dumps = str", "got '', which is no plimsoll.diagnosis.Rule"),
    "thief": ("dead-layer = thief:T", "T = object", "got the id of one of Plimsoll's rules"),
    "other": (
        "other = other:other",
        "from plimsoll.diagnosis import RULES\nother = lambda: RULES[0]",
        "got a rule with the id 'underflow-high'",
    ),
    "mute": (
        "mute = mute:Mute",
        "from plimsoll.diagnosis import Rule\nclass Mute(Rule):\n    id = 'mute'\n    def findings(self, view): ...",
        "got a rule without says, meaning, advice, figure",
    ),
}


@pytest.mark.parametrize("package", BROKEN)
def test_a_package_that_cannot_be_loaded_is_named(package: str, install: Install, tmp_path: Path) -> None:
    entry, source, reason = BROKEN[package]
    install("json_rule" if package == "json" else package, entry, source)
    path = SOUND.write(tmp_path / "run", until=20)
    name = entry.split(" ")[0]
    with pytest.warns(RuntimeWarning, match=rf"the rule '{name}' of the package \w+ to load .*{reason}.*left out"):
        assert diagnose(path) == []
    assert diagnose(path) == [], "reported once"
    if name not in IDS:
        with pytest.raises(ArgumentError, match=f"the rule '{name}' of the package .*{reason}"):
            diagnose(path, rules=[name])


def test_two_packages_with_one_id_are_both_left_out(install: Install, tmp_path: Path) -> None:
    source, entry = guide()
    for package in ("first", "second"):
        install(package, entry.replace("plimsoll_loss", package), source)
    path = SOUND.write(tmp_path / "run", until=20)
    with pytest.warns(RuntimeWarning, match="of the package first and second .* got several rules of that id"):
        assert diagnose(path) == []


@pytest.mark.parametrize("method", ["findings", "phrase", "is_fatal", "consequence", "figure_arguments"])
def test_an_error_of_a_packaged_rule_stops_nothing(method: str, install: Install, tmp_path: Path) -> None:
    source, entry = guide()
    source += f"\n    def {method}(self, *given):\n        raise RuntimeError('of {method}')\n".replace("\n\n", "\n")
    source = source.replace('finding("warning"', 'finding("alarm"')
    install("plimsoll_loss", entry, source)
    path = SOUND.write(tmp_path / "run", until=20)

    def surfaces(path: Path) -> None:
        found = diagnose(path)
        if found:
            nan = a_finding(registry.OWN["nonfinite"], since_step=0, evidence={"steps_with_loss": 3})
            assert summary(path, [nan, *found]).state == summary(path, found).state == "alarm"
            assert figure_for(path, found[0]).data

    with pytest.warns(RuntimeWarning, match=f"'loss-high' of the package plimsoll_loss .*RuntimeError: of {method}"):
        surfaces(path)
    with warnings.catch_warnings():  # reported once
        warnings.simplefilter("error")
        made = summary(path)
    if method == "phrase":
        assert made.verdict == "Problem: loss-high holds since step 0."
