"""Manifold-constrained hyper-connections (mHC): n residual streams in place of one.

A sublayer reads a weighted sum of the streams (`pre`) and is written back to all of them (`post`)
while the streams are mixed by a nearly doubly stochastic matrix (`comb`). All three come from the
residual itself. DeepSeek V4 uses a sublayer's own `pre`; V4.1 ("single pass") the `pre` computed
one sublayer earlier, so that the sum can be formed while the residual is still at hand.
"""

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.layers import KERNEL_INIT


@flax.struct.dataclass
class StreamMix:
    """How one sublayer reads and writes n streams; all float32."""

    pre: jax.Array  # f32[.., n], weights of the sum the sublayer reads
    post: jax.Array  # f32[.., n], how much of its output each stream takes
    comb: jax.Array  # f32[.., n, n], from stream (first) to stream (second)


class HyperConnection(nn.Module):
    """The weights of one sublayer's mix: fn [n(2+n), n, D], base [n(2+n)], scale [3].

    Source: DeepSeek V4 and V4.1 inference code, `hc_pre`; mHC paper, section 4.
    """

    streams: int  # n
    iterations: int  # Sinkhorn
    norm_eps: float
    eps: float  # added to gates and denominators

    @nn.compact
    def __call__(self, residual: jax.Array) -> StreamMix:
        """Weights from the residual [.., n, D]."""
        n = self.streams
        logits, scale, base = _stream_logits(self, residual, n * (2 + n), 3, self.norm_eps)
        pre = jax.nn.sigmoid(logits[..., :n] * scale[0] + base[:n]) + self.eps
        post = 2 * jax.nn.sigmoid(logits[..., n : 2 * n] * scale[1] + base[n : 2 * n])
        comb = (logits[..., 2 * n :] * scale[2] + base[2 * n :]).reshape(*pre.shape[:-1], n, n)
        return StreamMix(
            pre=pre, post=post, comb=sinkhorn(comb, iterations=self.iterations, eps=self.eps)
        )


class StreamHead(nn.Module):
    """The last sum over the streams in V4 (`hc_head`): fn [n, n, D], base [n], scale [1]."""

    streams: int
    norm_eps: float
    eps: float

    @nn.compact
    def __call__(self, residual: jax.Array) -> jax.Array:
        """[.., n, D] -> [.., D]."""
        logits, scale, base = _stream_logits(self, residual, self.streams, 1, self.norm_eps)
        return read_streams(residual, jax.nn.sigmoid(logits * scale[0] + base) + self.eps)


def _stream_logits(
    module: nn.Module, residual: jax.Array, outputs: int, scales: int, norm_eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Projects the normalised residual; one statistic over all n*D values of a token."""
    fn = module.param("fn", KERNEL_INIT, (outputs, *residual.shape[-2:]))
    base = module.param("base", nn.initializers.zeros_init(), (outputs,))
    scale = module.param("scale", nn.initializers.ones_init(), (scales,))
    x = residual.astype(jnp.float32)
    logits = jnp.einsum("...nd,mnd->...m", x, fn.astype(jnp.float32))
    size = jnp.mean(jnp.square(x), axis=(-2, -1))[..., None]
    return logits * jax.lax.rsqrt(size + norm_eps), scale, base


def sinkhorn(logits: jax.Array, *, iterations: int, eps: float) -> jax.Array:
    """Turns logits into a matrix whose rows and columns sum to about one.

    Args:
      logits: f32[.., n, n].
      iterations: pairs of row and column steps; in the first, the row step is a softmax.
      eps: added after the softmax and to every denominator.

    Returns:
      f32[.., n, n]; the columns were divided last.
    """
    x = jax.nn.softmax(logits, axis=-1) + eps
    x = x / (x.sum(axis=-2, keepdims=True) + eps)

    def step(_: jax.Array, x: jax.Array) -> jax.Array:
        x = x / (x.sum(axis=-1, keepdims=True) + eps)
        return x / (x.sum(axis=-2, keepdims=True) + eps)

    return jax.lax.fori_loop(1, iterations, step, x)


def read_streams(residual: jax.Array, pre: jax.Array) -> jax.Array:
    """What a sublayer reads: the weighted sum of the streams.

    Args:
      residual: [.., n, D].
      pre: f32[.., n].

    Returns:
      [.., D] in the residual's type, summed in float32.
    """
    x = jnp.einsum("...n,...nd->...d", pre, residual.astype(jnp.float32))
    return x.astype(residual.dtype)


def write_streams(y: jax.Array, residual: jax.Array, mix: StreamMix) -> jax.Array:
    """Adds a sublayer's output to the mixed streams.

    Args:
      y: [.., D].
      residual: [.., n, D], as it was before the sublayer.
      mix: computed from that residual.

    Returns:
      [.., n, D]: stream k gets post_k y + sum_j comb[j, k] residual_j.
    """
    mixed = jnp.einsum("...jk,...jd->...kd", mix.comb, residual.astype(jnp.float32))
    added = mix.post[..., None] * y.astype(jnp.float32)[..., None, :]
    return (added + mixed).astype(residual.dtype)


def first_stream(residual: jax.Array) -> jax.Array:
    """The `pre` that V4.1 starts with, a one-hot on stream 0: f32[.., n] for [.., n, D]."""
    n = residual.shape[-2]
    return jnp.broadcast_to(jax.nn.one_hot(0, n, dtype=jnp.float32), residual.shape[:-1])
