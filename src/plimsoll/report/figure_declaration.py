"""Declaration of figures: a decorator, read by all that lists or draws figures."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from plimsoll.errors import ArgumentError

if TYPE_CHECKING:
    from plotly.graph_objects import Figure  # pyright: ignore[reportMissingTypeStubs]

    from plimsoll.diagnosis import View

Drawn = TypeVar("Drawn", bound=Callable[..., Any])
# Expected height of a drawing in pixels, for a view and the arguments of the drawing.
Height = Callable[["View", Mapping[str, Any]], int]

# Arguments that a query may name, and the parameter each sets.
PARAMETER_OF = {
    "collection": "collection",
    "name": "name",
    "statistic": "statistic",
    "format": "fmt",
    "formats": "formats",
    "shift": "shift",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A drawing that the page and the report offer: its label and its arguments."""

    label: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """A declared figure: its function, and how it is offered and drawn."""

    name: str
    function: Callable[..., "Figure"]
    runs: tuple[int, ...]
    arguments: tuple[str, ...]
    required: tuple[str, ...]
    takes_findings: bool
    offered: Literal["scale", "layers"] | None
    cases: "Callable[[View], Iterable[Case]] | None"
    of_finding: "Callable[..., Figure] | None"
    height: int | Height

    def expected_height(self, view: "View", arguments: Mapping[str, Any]) -> int:
        """Return about how high a drawing will be, in pixels, without drawing it."""
        return self.height if isinstance(self.height, int) else self.height(view, arguments)


DECLARED: dict[str, Declared] = {}


def if_scaled(label: str) -> "Callable[[View], list[Case]]":
    """Return one case of a loss-scale figure, if there was a scale or narrow format."""

    def cases(view: "View") -> list[Case]:
        narrow = view.narrow("gradients")
        useful = narrow is not None and (narrow.censors.any() or view.scaled)
        return [Case(label=label, arguments={})] if useful else []

    return cases


def figure(
    *,
    name: str | None = None,
    runs: tuple[int, ...] = (1,),
    offered: Literal["scale", "layers"] | None = None,
    cases: "Callable[[View], Iterable[Case]] | None" = None,
    of_finding: "Callable[..., Figure] | None" = None,
    height: int | Height = 400,
) -> Callable[[Drawn], Drawn]:
    """Declare a function as a figure.

    The query arguments are those parameters of the function that `PARAMETER_OF` names.

    Args:
        name: The name that findings and addresses use. Default: the function's name.
        runs: How many runs the figure compares: `(1,)`, `(2,)` or both. Default: `(1,)`.
        offered: The section of a run's page and report that shows it. Default: none.
        cases: The drawings in that section, for a view. Default: one, without arguments.
        of_finding: Draws the figure of a finding, from a view, the finding, and keyword arguments that the finding's
            rule may add. Default: the function with the view alone.
        height: The expected height in pixels, legend included, or a function that returns it. The page reserves that
            room, so that nothing moves when the figure arrives.

    Raises:
        ArgumentError: Another function has this name.
    """

    def declare(function: Drawn) -> Drawn:
        key = name or function.__name__
        parameters = inspect.signature(function).parameters
        arguments = tuple(word for word, parameter in PARAMETER_OF.items() if parameter in parameters)
        home = (function.__module__, function.__qualname__)
        known = DECLARED.get(key)
        # A module that is loaded again declares the same function again.
        if known is not None and (known.function.__module__, known.function.__qualname__) != home:
            raise ArgumentError(
                f"figure: expected a name that no figure has; got name={key!r}, a figure of "
                f"{known.function.__module__}. Choose another name."
            )
        DECLARED[key] = Declared(
            name=key,
            function=function,
            runs=runs,
            arguments=arguments,
            required=tuple(w for w in arguments if parameters[PARAMETER_OF[w]].default is inspect.Parameter.empty),
            takes_findings="findings" in parameters,
            offered=offered,
            cases=cases,
            of_finding=of_finding,
            height=height,
        )
        return function

    return declare


class Figures(Mapping[str, Callable[..., "Figure"]]):
    """Mapping of the declared figures' functions by name, in alphabetical order."""

    def __getitem__(self, name: str) -> Callable[..., "Figure"]:
        return DECLARED[name].function

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(DECLARED))

    def __len__(self) -> int:
        return len(DECLARED)

    def __repr__(self) -> str:
        return f"FIGURES({', '.join(self)})"
