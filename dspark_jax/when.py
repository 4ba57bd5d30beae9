"""Work on large buffers that a round does or leaves."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def when(wanted: jax.Array, step: Callable[..., Any], carry: Any, *inputs: Any) -> Any:
    """`step(carry, *inputs)` if wanted, otherwise `carry`, which is updated in place.

    A loop of at most one step, as the result of a branch would be a copy. The inputs wait for the
    loop's counter: what is the same in every step the compiler would compute before the loop,
    wanted or not.

    Args:
      wanted: bool[].
      step: from the carry and the inputs to a carry of the same shapes.
      carry: a tree of arrays; those that `step` returns as they are cost nothing.
      inputs: trees of arrays. Work of `step` on other arrays alone may be done in any case.

    Returns:
      The carry.
    """

    def body(i: jax.Array, carry: Any) -> Any:
        _, held = jax.lax.optimization_barrier((i, inputs))
        return step(carry, *held)

    return jax.lax.fori_loop(0, wanted.astype(jnp.int32), body, carry)
