"""Triton's interpreter without what it does over and over: two fifths of the time of an interpreted test.

Every call of a kernel's function by another one looks through triton.language for what it has patched already; every tensor makes its
type, the type's name and its shape's values anew. Results do not change; releases not named here run as they are."""

from __future__ import annotations

import functools
import math

import triton
from triton import language as tl
from triton.runtime import interpreter

RELEASES = ("3.6.0",)


def patch_once() -> None:
    """A call inside another one patches triton.language only where its function sees a module that is not patched. (What inner calls patch
    stays so, here as without this; what a launch patches is restored at its end.)"""
    patch, patched = interpreter._patch_lang, set()
    launched = False

    @functools.cache
    def seen(fn) -> frozenset[str]:
        return frozenset(x.__name__ for x in fn.__globals__.values() if x is tl or x is tl.core)

    def patch_new(fn):
        nonlocal launched
        if launched and seen(fn) <= patched:
            return None  # nobody restores an inner call's scope
        scope = patch(fn)
        patched.update(seen(fn))
        if not launched:
            launched, restore = True, scope.restore

            def end() -> None:
                nonlocal launched
                launched = False
                patched.difference_update(seen(fn))
                restore()

            scope.restore = end
        return scope

    interpreter._patch_lang = patch_new


def share_types() -> None:
    """Equal block types are one object, which holds the shape of its tensors, and one object is equal to itself at once."""
    make, same, types = tl.block_type.__init__, tl.block_type.__eq__, {}
    true, no_shape = tl.constexpr(True), (tl.constexpr(1), tl.core.tuple([]))

    def init(self, element_ty, shape):
        if not hasattr(self, "of_tensors"):
            make(self, element_ty, shape)
            self.of_tensors = tl.constexpr(math.prod(self.shape)), tl.core.tuple([tl.constexpr(n) for n in self.shape])

    def new(cls, element_ty, shape, *more):
        if cls is not tl.block_type:  # Gluon's types have a layout
            return object.__new__(cls)
        key = (element_ty.name, *map(tl.core._unwrap_if_constexpr, shape))
        if key not in types:
            type = object.__new__(cls)
            init(type, element_ty, shape)
            types[key] = type
        return types[key]

    def tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.of_tensors if type.is_block() else no_shape

    tl.block_type.__new__, tl.block_type.__init__ = new, init
    tl.block_type.__eq__ = lambda self, other: self is other or (type(self) is not tl.block_type and same(self, other))
    tl.tensor.__init__ = tensor

    equal = tl.core.tuple.__eq__
    tl.core.tuple.__eq__ = lambda self, other: true if self is other else equal(self, other)

    find, found = interpreter._get_np_dtype, {}

    def np_dtype(type):
        name = type.scalar.name
        if name not in found:
            found[name] = find(type)
        return found[name]

    interpreter._get_np_dtype = np_dtype


def install() -> None:
    if triton.__version__ in RELEASES:
        patch_once()
        share_types()
