"""Confidence before any draft: against the formula, and against the real one where they meet."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.draft.confidence import confidence_logits
from dspark_jax.draft.presample import GROUP, LIKELIEST, likeliest, presampled_logits
from dspark_jax.types import SharedHead

R, K, V, D, Q = 3, 4, 90, 6, 5


@pytest.fixture
def case() -> dict:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    return {
        "params": {
            "markov": {"w1": normal(V, Q)},
            "confidence": {"weight": normal(D + Q), "bias": normal()},
        },
        "shared": SharedHead(embedding=normal(V, D), head=normal(V, D)),
        "anchor": jnp.array([3, 80, 7]),
        "block_hidden": normal(R, K, D),
        "base_logits": 3 * normal(R, K, V),
        "temperature": jnp.array([1.0, 0.5, 2.0]),
    }


def presampled(case: dict) -> np.ndarray:
    return np.asarray(jax.jit(lambda case: presampled_logits(**case))(case))


def test_is_the_head_on_the_expected_embedding(case: dict):
    got = presampled(case)
    table = np.asarray(case["params"]["markov"]["w1"], np.float64)
    weight = np.asarray(case["params"]["confidence"]["weight"], np.float64)
    for r in range(R):
        for k in range(K):
            embedding = table[case["anchor"][r]]
            if k > 0:
                logits = np.asarray(case["base_logits"][r, k - 1], np.float64)
                kept = np.argsort(-logits)[:64]
                p = np.exp((logits[kept] - logits.max()) / float(case["temperature"][r]))
                embedding = (p / p.sum()) @ table[kept]
            x = np.concatenate([np.asarray(case["block_hidden"][r, k]), embedding])
            want = x @ weight + float(case["params"]["confidence"]["bias"])
            np.testing.assert_allclose(got[r, k], want, rtol=1e-4, atol=1e-5)


def test_greedy_takes_the_likeliest_token_and_the_anchor_is_known(case: dict):
    got = presampled(case | {"temperature": jnp.zeros(R)})
    previous = jnp.concatenate(
        [case["anchor"][:, None], jnp.argmax(case["base_logits"][:, :-1], axis=-1)], axis=1
    )
    real = confidence_logits(
        case["params"]["confidence"], case["block_hidden"],
        case["params"]["markov"]["w1"][previous],
    )  # fmt: skip
    np.testing.assert_allclose(got, real, rtol=1e-5, atol=1e-5)


def test_reduced_vocabularies_look_their_own_tokens_up(case: dict):
    ids = jnp.asarray(np.random.default_rng(1).permutation(V)[:40])
    full = jnp.full((R, K, V), -jnp.inf).at[:, :, ids].set(case["base_logits"][:, :, :40])
    reduced = case | {
        "base_logits": case["base_logits"][:, :, :40],
        "shared": case["shared"].replace(target_ids=ids),
    }
    np.testing.assert_allclose(
        presampled(reduced), presampled(case | {"base_logits": full}), rtol=1e-5, atol=1e-5
    )


def test_a_head_that_reads_no_tokens_needs_no_estimate(case: dict):
    head = {"weight": case["params"]["confidence"]["weight"][:D], "bias": jnp.zeros(())}
    got = presampled(case | {"params": {"confidence": head}})
    want = confidence_logits(head, case["block_hidden"], None)
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("size", [LIKELIEST // 2, LIKELIEST * GROUP, LIKELIEST * GROUP + 5, 5000])
def test_likeliest_are_the_largest(size: int):
    rng = np.random.default_rng(size)
    logits = jnp.asarray(rng.normal(size=(2, 3, size)), jnp.float32)
    logits = logits.at[0, :, :: -(-size // GROUP)].add(9.0)  # many of one group
    values, ids = jax.jit(likeliest, static_argnums=1)(logits, LIKELIEST)
    want = np.sort(logits, axis=-1)[..., ::-1][..., :LIKELIEST]
    np.testing.assert_array_equal(values, want)
    np.testing.assert_array_equal(np.take_along_axis(np.asarray(logits), np.asarray(ids), -1), want)
    assert all(len(set(row)) == len(row) for row in np.asarray(ids).reshape(6, -1).tolist())
