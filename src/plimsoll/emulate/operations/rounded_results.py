"""Operations whose results are rounded to a format, selected ones or all."""

from collections.abc import Mapping
from typing import Any, cast as typed

import torch
from torch import Tensor

from plimsoll.emulate.dispatch import operation_kernels, thread_frame
from plimsoll.emulate.operation_counts import Counts
from plimsoll.emulate.recipe import Recipe


class Rounded:
    """Rules that round an operation's result, and the gradient that returns to it."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def alone(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation as torch does, and round its result."""
        return self.result(op(*args, **kwargs), args)

    def after(self, rule: thread_frame.Rule) -> thread_frame.Rule:
        """Return the rule, with its result rounded."""

        def rounded(op: Any, args: Any, kwargs: Any) -> Any:
            result = rule(op, args, kwargs)
            return result if result is NotImplemented else self.result(result, args)

        return rounded

    def result(self, result: Any, args: Any) -> Any:
        """Return a result rounded, in place what the operation wrote in place."""
        if isinstance(result, Tensor):
            if not result.is_floating_point() or not result.numel():
                return result
            rounded = self._recipe.anywhere(result)
            if not any(result is x for x in args):
                return rounded
            # An operation may need its result in the backward, as ReLU does. As on hardware it is the rounded one.
            with typed("Any", torch.autograd)._unsafe_preserve_version_counter(result):  # noqa: SLF001
                return result.copy_(rounded)
        if isinstance(result, tuple | list):
            return tuple(self.result(item, args) for item in typed("list[Any]", result))
        return result


class RoundingTracer:
    """Tracer that rounds the results of all floating operations in the forward."""

    def __init__(self, counts: Counts, rounded: Rounded) -> None:
        self._counts, self._rounded = counts, rounded

    def ruled(self, op: Any) -> None:
        """Count a call that a rule computed."""
        self._counts.ruled(op)

    def native(self, op: Any, arguments: Any, result: Any) -> Any:
        """Round a result that torch computed."""
        if thread_frame.in_backward() or not any(map(_floating, arguments)):
            return self._counts.native(op, arguments, result)
        self._counts.ruled(op)
        return self._rounded.result(result, arguments)


def within(rules: Mapping[str, thread_frame.Rule]) -> thread_frame.Rule:
    """Return the rule for a composite operation, whose inner calls have the rules."""

    def run(op: Any, args: Any, kwargs: Any) -> Any:
        return operation_kernels.run_intercepted(op, args, kwargs, rules)

    return run


def _floating(x: Any) -> bool:
    if isinstance(x, Tensor):
        return x.is_floating_point()
    return isinstance(x, tuple | list) and any(map(_floating, typed("list[Any]", x)))
