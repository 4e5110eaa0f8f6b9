"""Methods of a module that are kept within that module.

A bound method holds its module: kept there, both would stay in device memory until a garbage collection, which may be
a long time after the last user of an engine has let go of it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any
from weakref import ref


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A bound method that does not hold its object; anything else as it is. To be called while the object lives."""
    if not isinstance(method, MethodType):
        return method
    function, owner = method.__func__, ref(method.__self__)

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(owner(), *args, **kwargs)

    return call
