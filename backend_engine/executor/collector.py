"""How often Python looks for objects that refer to each other in circles and that nobody else needs.

Set once by the composition root, for the whole process. Python looks after 700 more objects than before, and a step of
many requests makes more than that only to drop them at its end: each step would be interrupted, what it still held be
taken for old, and with enough of that taken for old, every queued prompt and every module be walked through.
"""

import gc

OBJECTS_A_REQUEST = 16
"""More than a step makes for one of its requests."""
LEAST_OBJECTS = 20_000
_ROUNDS = 2
"""Looks at young objects, less one, before one at older ones; so a look at all comes about as often as by default."""


def spare_the_steps(max_batch_size: int) -> None:
    """Let no step of up to ``max_batch_size`` requests be interrupted; garbage in circles is still found.

    A collector that is switched off, or that looks less often already, is left as it is.
    """
    wanted = max(LEAST_OBJECTS, OBJECTS_A_REQUEST * max_batch_size)
    if 0 < gc.get_threshold()[0] < wanted:
        gc.set_threshold(wanted, _ROUNDS, _ROUNDS)
