"""Words that all surfaces use for collections, layers and their numbers."""

from collections.abc import Sequence

from plimsoll.diagnosis.finding import Finding, grouped, shown
from plimsoll.tensor_collections import LABELS
from plimsoll.text import counted


def collection_words(collection: str | None) -> str:
    """Return what a collection is called within a sentence.

    >>> collection_words("gradients"), collection_words("weights"), collection_words(None)
    ('parameter gradients', 'weights', 'values')
    """
    name = collection or "values"
    return LABELS.get(name, shown(name.replace("_", " ")))


def value_words(collection: str) -> str:
    """Return what a collection's values are called.

    >>> value_words("gradients"), value_words("activation_gradients"), value_words("activations")
    ('parameter gradient values', 'activation gradient values', 'activation values')
    """
    return f"{collection_words(collection).removesuffix('s')} values"


def layer_name(name: str) -> str:
    """Return the layer that a parameter or an output stands for.

    >>> layer_name("blocks.0.qkv.weight"), layer_name("blocks.0.qkv:output"), layer_name("blocks.0.qkv:input")
    ('blocks.0.qkv', 'blocks.0.qkv', 'blocks.0.qkv:input')
    """
    return name.removesuffix(".weight").removesuffix(":output") or name


def how_many(finding: Finding) -> str:
    """Return the number of a finding's locations, of how many: "15 of 35 layers"."""
    # Gradients of parameters are judged by layer, all else tensor by tensor.
    noun = "layer" if finding.collection == "gradients" else "tensor"
    many, of = len(finding.where), finding.evidence.get("of_layers")
    if not isinstance(of, int) or of < many:
        return counted(many, noun)
    return f"all {counted(of, noun)}" if of == many and many > 1 else f"{many:,} of {counted(of, noun)}"


def located(finding: Finding, most: int = 3) -> str:
    """Return a finding's location: its name, or the number of several and the worst.

    Names that are left out are "...". Their number is given only once.
    """
    names = [layer_name(name) for name in finding.where] if finding.collection == "gradients" else finding.where
    if not names:
        return ""
    return grouped(names) if len(names) == 1 else f"{how_many(finding)}: {first_of(names, most)}"


def first_of(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, those alike as one, with "..." for the others.

    >>> first_of(["a.0.w", "a.1.w", "b", "c"], 2)
    'a.{0-1}.w, b, ...'
    """
    listed, more, _ = grouped(names, most).partition(" and ")
    return f"{listed}, ..." if more else listed
