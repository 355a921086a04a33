"""Registry of the collections of tensors that a watch can record.

Every list of collections in Plimsoll is a comprehension over `COLLECTIONS`: the arguments of `watch`, the rules, the
planner, the figures, the command line and the live page. docs/contributing/add-a-collection.md shows how to add one.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from plimsoll.formats import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCollection:
    """Facts about one collection.

    Attributes:
        name: The name in `watch(collect=...)`, in run folders and in addresses of the live page.
        label: The name within a sentence.
        owner: What a series is named after: a parameter ("blocks.0.weight", "blocks.0.weight:exp_avg") or a side of a
            module ("blocks.0:output").
        phase: The part of a training step in which the tensors arise.
        step_order: Position in a step. A collection is computed from those before it.
        display_order: Position in lists that users see.
        underflow_order: Position among the collections that are judged for underflow. None: not judged.
        overflow_order: Position among the collections that are judged for overflow and NaN. None: not judged.
        carries_loss_scale: Whether stored values are multiplied by the loss scale.
        supports_blocks: Whether `watch(block=...)` measures it in blocks.
        is_shadowed: Whether a shadow step computes it again in FP32.
        role: The operand of a matrix product that its values are, in a precision plan. None: none.
        format_in_summary: Whether the summary of a run states its formats.
        heatmaps: Statistics whose heat maps the single-file report shows.
    """

    name: str
    label: str
    owner: Literal["parameter", "module"]
    phase: Literal["forward", "backward", "update"]
    step_order: int
    display_order: int
    underflow_order: int | None = None
    overflow_order: int | None = None
    carries_loss_scale: bool = False
    supports_blocks: bool = False
    is_shadowed: bool = False
    role: "Role | None" = None
    format_in_summary: bool = False
    heatmaps: tuple[str, ...] = ()


# In the order of `watch`'s default, which the command line's help shows.
COLLECTIONS: tuple[TensorCollection, ...] = (
    TensorCollection(
        name="weights",
        label="weights",
        owner="parameter",
        phase="forward",
        step_order=1,
        display_order=4,
        overflow_order=2,
        supports_blocks=True,
        role="weights",
        format_in_summary=True,
        heatmaps=("norm",),
    ),
    TensorCollection(
        name="gradients",
        # "Gradients" alone is ambiguous: a run has two kinds, with different shares of underflow.
        label="parameter gradients",
        owner="parameter",
        phase="backward",
        step_order=4,
        display_order=1,
        underflow_order=1,
        overflow_order=3,
        carries_loss_scale=True,
        supports_blocks=True,
        is_shadowed=True,
        format_in_summary=True,
        heatmaps=("underflow", "zero", "norm", "error"),
    ),
    TensorCollection(
        name="activations",
        label="activations",
        owner="module",
        phase="forward",
        step_order=2,
        display_order=3,
        underflow_order=3,
        overflow_order=1,
        supports_blocks=True,
        is_shadowed=True,
        role="activations",
        format_in_summary=True,
        heatmaps=("underflow", "std", "error"),
    ),
    TensorCollection(
        name="activation_gradients",
        label="activation gradients",
        owner="module",
        phase="backward",
        step_order=3,
        display_order=2,
        underflow_order=2,
        overflow_order=4,
        carries_loss_scale=True,
        supports_blocks=True,
        is_shadowed=True,
        # The operand of both products of a backward is the gradient of a module's output, not that of its weight.
        role="gradients",
        heatmaps=("underflow", "error"),
    ),
    TensorCollection(
        name="optimizer",
        label="optimizer state",
        owner="parameter",
        phase="update",
        step_order=6,
        display_order=5,
        overflow_order=5,
        heatmaps=("norm",),
    ),
    TensorCollection(
        name="updates",
        label="updates",
        owner="parameter",
        phase="update",
        step_order=5,
        display_order=6,
        heatmaps=("ratio", "unmoved"),
    ),
)

NAMES = tuple(c.name for c in COLLECTIONS)
IN_STEP_ORDER = tuple(sorted(COLLECTIONS, key=lambda c: c.step_order))
IN_DISPLAY_ORDER = tuple(sorted(COLLECTIONS, key=lambda c: c.display_order))
FORWARD, BACKWARD, UPDATE = (
    tuple(c.name for c in IN_STEP_ORDER if c.phase == phase) for phase in ("forward", "backward", "update")
)
OF_PARAMETERS = tuple(c.name for c in COLLECTIONS if c.owner == "parameter")
OF_MODULES = tuple(c.name for c in COLLECTIONS if c.owner == "module")
# Parameters and their gradients: what can be read before an optimizer steps.
BEFORE_UPDATE_OF_PARAMETERS = tuple(c.name for c in COLLECTIONS if c.owner == "parameter" and c.phase != "update")
WITH_LOSS_SCALE = tuple(c.name for c in IN_DISPLAY_ORDER if c.carries_loss_scale)
WITHOUT_LOSS_SCALE = tuple(c.name for c in COLLECTIONS if not c.carries_loss_scale)
UNDERFLOW_ORDER = tuple(
    name for _, name in sorted((c.underflow_order, c.name) for c in COLLECTIONS if c.underflow_order is not None)
)
OVERFLOW_ORDER = tuple(
    name for _, name in sorted((c.overflow_order, c.name) for c in COLLECTIONS if c.overflow_order is not None)
)
LABELS = {c.name: c.label for c in IN_DISPLAY_ORDER}
