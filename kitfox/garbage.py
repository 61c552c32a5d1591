"""When Python looks for garbage that refers to itself: seldom, and never among what a process was started with."""

from __future__ import annotations

import gc

# A step of 256 requests makes some thousand objects that are gone after the next, and hardly ever a cycle.
_YOUNG_OBJECTS = 20_000


def keep_what_is_loaded() -> None:
    """What is there now stays; a collection that looks at it takes as long as several steps."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])
