"""Pytest plugin: kinds of tests, tests that share one worker, random order, and one line on those that were skipped.

The kind of a test is found from the code that it and its fixtures reach in `tests/`, so nobody marks tests by hand.
`tests/slow.txt` adds those that are slow for another reason. To make it again, run `make test` with
`PYTEST_ARGS="--costs=FILE"`, then `python -m tests.tiers FILE`.
"""

import random
import re
import resource
import sys
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

from tests.support import processes

HERE = Path(__file__).parent
SLOW = {
    "processes": "starts processes",
    "compile": "compiles a model",
    "triton": "runs Triton's interpreter or compiler",
    "browser": "shows pages in Chromium",
    "training": "carries out an experiment of the laboratory",
    "docs": "runs the code of pages and examples",
    "gpu": "needs a CUDA device",
}
OTHERS = {
    "slow": "of one of these kinds, or in tests/slow.txt: make quick leaves it out",
    "sensitive": "would be the first to notice another processor, memory layout, order or load",
}
_REACHES = {
    "processes": {"subprocess", "Popen", "fork", "processes", "ranks", "multiprocessing", "get_context"},
    "compile": {"compile"},
}
_FIXTURES = {"browser": {"browser", "page", "opened"}}
_SHOWN = 60  # characters of a text that a case is named after
_ALONE = ("processes", "browser", "docs")
_QUICK = 0.1  # CPU seconds of a case
_QUICK_WITH_CASES = 0.4  # of all cases of a test
_NEEDS = {"browser": re.compile("Chromium"), "gpu": re.compile(r"needs a (CUDA|GPU)")}  # in a skip's reason
_FILES = {
    "triton": re.compile(r"tests/kernels/test_(triton|fp8_compile)"),
    "training": re.compile(r"tests/lab/"),
    "docs": re.compile(r"tests/(test_docs|test_examples)"),
    "gpu": re.compile(r"tests/.*test_cuda\.py"),
    "sensitive": re.compile(
        r"tests/(spectrum/test_(measure|spectrum)|kernels/test_(measure|unscale|update)"
        r"|watch/test_(transparency|taps|endings|withstand)|runs/test_(failures|processes)|runs/sinks/test_runner|unit/audit/test_numbers|scaling/test_layers_exact"
        r"|report/test_(page_follow|server_stream)|cli/test_(stores|app))"
    ),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options."""
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run files, and tests within a file, in random order")
    parser.addoption("--costs", metavar="FILE", help="append the CPU seconds of every test, with its processes'")


def pytest_configure(config: pytest.Config) -> None:
    """Declares the markers."""
    for name, meaning in (SLOW | OTHERS).items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    config.addinivalue_line("markers", "xdist_group(name): of pytest-xdist, which need not be there")


def pytest_report_header(config: pytest.Config) -> str | None:
    """Says how to repeat a random order."""
    seed = config.getoption("shuffle")
    return None if seed is None else f"random order: --shuffle {seed}"


def pytest_make_parametrize_id(val: object) -> str | None:
    """Names a case after the beginning of a long text: workers send each other all names."""
    return f"{ascii(val[:_SHOWN])[1:-1]}..." if isinstance(val, str) and len(val) > 4 * _SHOWN else None


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Marks, groups and orders the tests; a wrapper, since pytest-xdist reads the groups in its own first hook."""
    listed = {line for line in (HERE / "slow.txt").read_text("utf-8").splitlines() if line and line[0] != "#"}
    for item in items:
        kinds = kinds_of(item)
        if kinds & SLOW.keys() or item.nodeid.partition("[")[0] in listed:
            kinds.add("slow")
        for kind in sorted(kinds):
            item.add_marker(kind)
        if (group := _group_of(item)) is not None:
            item.add_marker(pytest.mark.xdist_group(group))
    seed = config.getoption("shuffle")
    if seed is None:
        items.sort(key=_SlowestFirst(items))
    else:
        shuffle(items, seed)
    yield


def shuffle(items: list[pytest.Item], seed: int) -> None:
    """Puts files, and the tests of each, into a random order; a file stays together for its fixtures' sake."""
    generator = random.Random(seed)
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    shuffled = list(files.values())
    generator.shuffle(shuffled)
    for tests in shuffled:
        generator.shuffle(tests)
    items[:] = [item for tests in shuffled for item in tests]


class _SlowestFirst:
    """Files that hold slow tests begin, so that no worker is left with one of them at the end."""

    def __init__(self, items: list[pytest.Item]) -> None:
        self._slow = {item.nodeid.partition("::")[0] for item in items if item.get_closest_marker("slow")}

    def __call__(self, item: pytest.Item) -> bool:
        return item.nodeid.partition("::")[0] not in self._slow


# -- kinds


def kinds_of(item: pytest.Item) -> set[str]:
    """The kinds that a test is of by its file, its fixtures and the code that it reaches."""
    names = reached(item)
    fixtures = set(getattr(item, "fixturenames", ()))
    needs = " ".join(str(mark.kwargs.get("reason", "")) for mark in item.iter_markers("skipif"))
    found = {kind for kind, pattern in _FILES.items() if pattern.match(item.nodeid)}
    found |= {kind for kind, wanted in _FIXTURES.items() if wanted & fixtures}
    found |= {kind for kind, pattern in _NEEDS.items() if pattern.search(needs)}
    return found | {kind for kind, wanted in _REACHES.items() if wanted & names}


def reached(item: pytest.Item) -> set[str]:
    """Every name that the test, its fixtures and what they call in `tests/` use."""
    names: set[str] = set()
    # A test of many cases (`cases.each`) is wrapped: its own body tells what it needs.
    function = getattr(item, "function", None)
    own = getattr(function, "body_of_cases", function)
    waiting = [own, *(definition.func for definition in _definitions(item))]
    seen: set[int] = set()
    while waiting:
        found = waiting.pop()
        if isinstance(found, type) and found.__module__.startswith("tests."):
            waiting += [member for member in vars(found).values() if isinstance(member, FunctionType)]
        if not isinstance(found, FunctionType) or id(found) in seen or str(HERE) not in found.__code__.co_filename:
            continue
        seen.add(id(found))
        used = set(_names_in(found.__code__))
        names |= used
        waiting += [found.__globals__[name] for name in used & found.__globals__.keys()]
        modules = [found.__globals__[n] for n in used & found.__globals__.keys()]
        waiting += [vars(m)[n] for m in modules if isinstance(m, ModuleType) for n in used & vars(m).keys()]
    return names if "torch" in names else names - {"compile"}


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _definitions(item: pytest.Item) -> list[Any]:
    """The fixtures of a test that `tests/` defines."""
    known: dict[str, list[Any]] = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    return [definitions[-1] for definitions in known.values() if definitions[-1].baseid]


# -- workers


def _group_of(item: pytest.Item) -> str | None:
    """Tests that share an expensive fixture, or what a module computes once, go to one worker; None for a test alone.

    Those that take long on their own, in processes or a browser, are shared out.
    """
    if item.get_closest_marker("xdist_group"):
        return None  # it says so itself
    scopes = {definition.scope: definition for definition in _definitions(item)}
    if (shared := scopes.get("session")) is not None:
        return f"{shared.baseid}:{shared.argname}"
    alone = any(item.get_closest_marker(kind) for kind in _ALONE) and not scopes.keys() & {"module", "package"}
    return None if alone else item.nodeid.partition("::")[0]


# -- what tests cost


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Writes the CPU seconds of a test, its fixtures and the processes that it has waited for."""
    before = _cpu_seconds()
    result = yield
    if path := item.config.getoption("costs"):
        with open(path, "a", encoding="utf-8") as costs:  # noqa: PTH123  (one short write: workers share the file)
            kinds = ",".join(kind for kind in SLOW if item.get_closest_marker(kind)) or "-"
            costs.write(f"{_cpu_seconds() - before:.3f} {kinds} {item.nodeid}\n")
    return result


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used) + processes.used[0]


def slow_tests(costs: str) -> list[str]:
    """The tests of no slow kind that cost too much for `make quick`, from what `--costs` has written."""
    cases: defaultdict[str, list[float]] = defaultdict(list)
    for seconds, kinds, name in (line.split(" ", 2) for line in costs.splitlines()):
        if kinds == "-":
            cases[re.split(r"[\[@]", name)[0]].append(float(seconds))  # behind @ stands the group
    return sorted(name for name, each in cases.items() if max(each) > _QUICK or sum(each) > _QUICK_WITH_CASES)


# -- what was left out


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says in one line what was skipped, and why."""
    skipped = Counter(_why(report) for report in terminalreporter.stats.get("skipped", ()))
    if skipped:
        parts = [f"{count}{what} tests: {why}" for (what, why), count in skipped.most_common()]
        terminalreporter.write_line(f"Skipped: {'; '.join(parts)}.")


def _why(report: Any) -> tuple[str, str]:
    """The kind of a skipped test, and the reason."""
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason, kinds = reason.removeprefix("Skipped: "), getattr(report, "keywords", ())
    if "gpu" in kinds or re.search(r"CUDA|GPU", reason):
        return " GPU", "need a CUDA device"
    if "browser" in kinds:
        return " browser", reason
    return "", reason


if __name__ == "__main__":
    slow = slow_tests(Path(sys.argv[1]).read_text("utf-8"))
    head = [line for line in (HERE / "slow.txt").read_text("utf-8").splitlines() if line.startswith("#")]
    (HERE / "slow.txt").write_text("\n".join([*head, *slow]) + "\n", encoding="utf-8")
