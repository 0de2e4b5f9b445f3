"""Has Triton's interpreter do once a launch what it does anew at every call within a kernel: a quarter of its time."""

from __future__ import annotations

from typing import Any

from triton import language
from triton.runtime.interpreter import InterpretedFunction

_call = InterpretedFunction.__call__


def call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A function of a module that a kernel may be in: the launch has made `language` the interpreter's."""
    if self.fn.__globals__.get("tl") is language:
        return self.rewrite()(*args, **kwargs)
    return _call(self, *args, **kwargs)


InterpretedFunction.__call__ = call
