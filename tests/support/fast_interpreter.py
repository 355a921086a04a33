"""Triton's interpreter, several times faster, with the same values.

Its time goes into descriptions of types and shapes, which it makes again for each operation of each program. Here each
is made once. The first of a kind is always made by Triton itself, so this holds for every version of it.
"""

import sys
from typing import Any

_prepared: set[str] = set()


def quicken(interpreter: Any) -> None:
    """Make the module `triton.runtime.interpreter` faster, and what it uses of Triton's language."""
    core, semantic = sys.modules["triton.language.core"], sys.modules["triton.language.semantic"]
    interpreter.InterpretedFunction.__call__ = _call_device_function
    interpreter._get_np_dtype = _known_dtypes(interpreter._get_np_dtype, core)
    core.dtype.__eq__ = _same_or_equal(core.dtype.__eq__)
    core.block_type.__init__ = _known_blocks(core.block_type.__init__, core)
    core.tensor.__init__ = _known_tensors(core.tensor.__init__)
    semantic.TritonSemantic.broadcast_impl_value = _of_equal_shapes(semantic.TritonSemantic.broadcast_impl_value)


def _call_device_function(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a device function, and prepare Triton's language for its module only once.

    The interpreter's own method does that at every call, in vain: the launch has prepared `triton.language`, and what
    is changed of `triton.language.core` by a call stays so. It took a third of the time of the kernels' tests.
    """
    module = function.fn.__module__
    if module not in _prepared:
        _prepared.add(module)
        sys.modules["triton.runtime.interpreter"]._patch_lang(function.fn)
    return function.rewrite()(*args, **kwargs)


def _known_dtypes(make: Any, core: Any) -> Any:
    """NumPy's dtype of a type: Triton makes a table of all of them at each call."""
    known: dict[str, Any] = {}

    def numpy_dtype(of: Any) -> Any:
        name = of.element_ty.name if isinstance(of, core.block_type) else of.name
        if name not in known:
            known[name] = make(of)
        return known[name]

    return numpy_dtype


def _same_or_equal(equal: Any) -> Any:
    """Equality of types, most of which are compared with themselves."""
    return lambda one, other: one is other or equal(one, other)


def _known_blocks(make: Any, core: Any) -> Any:
    """The constructor of `block_type`, which checks each shape once."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def construct(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [size.value if isinstance(size, core.constexpr) else size for size in shape]
        key = (element_ty.name, *sizes)
        if key not in known:
            make(self, element_ty, shape)
            known[key] = dict(vars(self))
        else:
            vars(self).update(known[key], element_ty=element_ty)

    return construct


def _known_tensors(make: Any) -> Any:
    """The constructor of `tensor`, which describes each type of result once."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def construct(self: Any, handle: Any, type: Any) -> None:  # noqa: A002  (Triton's own name)
        scalar = type.scalar
        key = (scalar.name, *type.shape) if type.is_block() else (scalar.name,)
        if key not in known:
            make(self, handle, type)
            known[key] = dict(vars(self))
        else:
            vars(self).update(known[key], handle=handle, type=type, dtype=scalar)

    return construct


def _of_equal_shapes(make: Any) -> Any:
    """Broadcasting, which returns at once where nothing is to be done."""

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        blocks = left.is_block() + right.is_block()
        if blocks == 0 or (blocks == 2 and [*left.shape] == [*right.shape]):
            return lhs, rhs
        return make(self, lhs, rhs)

    return broadcast
