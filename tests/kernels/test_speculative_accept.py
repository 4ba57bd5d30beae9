"""Acceptance from logits: loops, the rules of `verify.py`, the kernel, shards of the vocabulary."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dspark_jax.sampling import warp
from dspark_jax.types import SamplingParams
from dspark_jax.verify import accept_coupled, accept_standard
from pallas_kernels.chips import BLOCK_SIZES
from pallas_kernels.speculative_accept import ops

TILE = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    verify_len: tuple[int, ...]
    temperature: tuple[float, ...]
    vocab: int = 37  # two tiles and five columns
    block: int = 3
    dtype: str = "float32"
    dropped: float = 0.0  # share of logits at -inf


CASES = {
    # Two groups of requests, the second not full; 2 tiles and 5 columns; K+1 rows are no tile.
    "mixed": Case(
        verify_len=(0, 1, 2, 3, 3, 3, 3, 2, 3, 2, 3),
        temperature=(1.0, 0.7, 2.0, 0.9, 1.3, 0.0, 0.0, 0.0, 1.0, 1.0, 0.8),
        dropped=0.3,
    ),
    "one_request_bfloat16": Case(verify_len=(3,), temperature=(1.0,), dtype="bfloat16", vocab=20),
    "vocabulary_is_one_tile": Case(verify_len=(1, 2), temperature=(1.0, 0.5), block=2, vocab=TILE),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    sizes = dataclasses.replace(BLOCK_SIZES["v5e"], vocab_columns=TILE, vector_columns=TILE // 4)
    monkeypatch.setattr(ops, "block_sizes", lambda: sizes)


def _operands(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Drafts drawn from q, q near p; rows that are not verified hold NaN."""
    requests, block, vocab = len(case.verify_len), case.block, case.vocab
    temperature = np.array(case.temperature, np.float32)
    target = rng.normal(size=(requests, block + 1, vocab)) * 2
    draft = target[:, :-1] + rng.normal(size=(requests, block, vocab))
    dropped = rng.random((requests, 1, vocab)) < case.dropped
    dtype = jnp.dtype(case.dtype)
    target, draft = (np.where(dropped, -np.inf, x).astype(dtype) for x in (target, draft))
    noise = rng.gumbel(size=(requests, block, vocab)) * (temperature > 0)[:, None, None]
    scaled = draft.astype(np.float32) / np.where(temperature > 0, temperature, 1)[:, None, None]
    tokens = np.argmax(scaled + noise, axis=-1).astype(np.int32)
    unread = np.arange(block + 1) > np.array(case.verify_len)[:, None]
    target[unread], draft[unread[:, 1:]], tokens[unread[:, 1:]] = np.nan, np.nan, -1
    return dict(
        target_logits=target,
        draft_logits=draft,
        draft_tokens=tokens,
        verify_len=np.array(case.verify_len, np.int32),
        temperature=temperature,
        uniforms=rng.random((requests, block)).astype(np.float32),
        noise=rng.gumbel(size=(requests, vocab)).astype(np.float32),
    )


def _softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    if temperature < 1e-5:
        return np.eye(logits.size)[np.argmax(logits)]
    weights = np.exp((logits - logits.max()) / temperature)
    return weights / weights.sum()


def _loops(x: dict[str, jax.Array]) -> tuple[list[int], list[int]]:
    """Algorithm 1 of Leviathan et al. in float64, one draft at a time."""
    x = {k: np.asarray(v, np.float64 if "logits" in k else v.dtype) for k, v in x.items()}
    lengths, tokens = [], []
    for r, count in enumerate(x["verify_len"]):
        for k in range(count + 1):
            p = _softmax(x["target_logits"][r, k], x["temperature"][r])
            if k == count:
                break
            q = _softmax(x["draft_logits"][r, k], x["temperature"][r])
            token = x["draft_tokens"][r, k]
            if x["uniforms"][r, k] * q[token] >= p[token]:
                p = np.maximum(p - q, 0)
                break
        lengths.append(k)
        with np.errstate(divide="ignore"):
            tokens.append(int(np.argmax(np.log(p) + x["noise"][r])))
    return lengths, tokens


def _assert_equal(got: tuple, expected: tuple, message: str = "") -> None:
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=message)


def _run(method: str, impl: str, operands: dict[str, np.ndarray], **static) -> tuple:
    """The operation as one compiled program."""
    run = functools.partial(ops.speculative_accept, method=method, impl=impl, **static)
    return jax.device_get(jax.jit(run)(**operands))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_standard_equals_loops(case, rng):
    operands = _operands(case, rng)
    _assert_equal(_run("standard", "ref", operands), _loops(operands))


def test_cases_reject_early_late_and_not_at_all():
    """A table that never rejects, or never accepts, would show nothing."""
    case = CASES["mixed"]
    lengths, _ = _loops(_operands(case, np.random.default_rng(0)))
    found = {
        ("all" if a == v else "some" if a else "none")
        for a, v in zip(lengths, case.verify_len, strict=True)
        if v
    }
    assert found == {"all", "some", "none"}


def test_kernels_of_standard_equal_loops(rng, capfd):
    operands = _operands(CASES["mixed"], rng)
    _assert_equal(_run("standard", "interpret", operands), _loops(operands))
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


def _coupled_operands(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Key data for noise; the drafts of every other request are what the target draws."""
    operands = _operands(case, rng)
    del operands["uniforms"], operands["draft_logits"]
    shape = (len(case.verify_len), case.block + 1, 2)
    operands["noise"] = rng.integers(0, 2**32, size=shape, dtype=np.uint32)
    drawn = _target_tokens(operands)[:, :-1]
    drafts = operands["draft_tokens"]
    drafts[::2] = np.where(drafts[::2] < 0, drafts[::2], drawn[::2])
    return operands


def _target_tokens(operands: dict[str, np.ndarray]) -> np.ndarray:
    """What plain decoding draws at each row, from JAX's own noise."""
    logits = operands["target_logits"].astype(np.float32)
    temperature = operands["temperature"][:, None, None]
    keys = jax.random.wrap_key_data(operands["noise"], impl="threefry2x32")
    row = jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:])))
    scaled = logits / np.where(temperature > 0, temperature, 1) + (temperature > 0) * row(keys)
    return np.argmax(scaled, axis=-1).astype(np.int32)


@pytest.mark.parametrize(
    ("name", "impl"), [("mixed", "ref"), ("one_request_bfloat16", "interpret")]
)
def test_coupled_draws_what_plain_decoding_draws(name, impl, rng, capfd):
    case = CASES[name]
    operands = _coupled_operands(case, rng)
    tokens = _target_tokens(operands)
    expected = jax.device_get(
        accept_coupled(operands["draft_tokens"], tokens, operands["verify_len"])
    )
    got = _run("coupled", impl, operands)
    _assert_equal(got, (expected.accept_len, expected.bonus_token))
    assert got.accept_len.max() == 3
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


def test_greedy_takes_the_argmax(rng):
    operands = _operands(CASES["mixed"], rng)
    best = np.argmax(operands["target_logits"], axis=-1).astype(np.int32)
    operands["draft_tokens"][::3] = best[::3, :-1]
    shared = {k: operands[k] for k in ("target_logits", "draft_tokens", "verify_len")}
    expected = accept_coupled(operands["draft_tokens"], best, operands["verify_len"])
    _assert_equal(_run("greedy", "ref", shared), (expected.accept_len, expected.bonus_token))


def test_standard_equals_the_rule_on_log_probabilities(rng):
    """`auto`, which on this machine is the reference."""
    requests = 64
    case = Case(
        verify_len=tuple(rng.integers(0, 4, size=requests)),
        temperature=tuple(rng.choice([0.0, 0.6, 1.0], size=requests)),
    )
    x = _operands(case, rng)
    x |= {k: np.nan_to_num(x[k]) for k in ("target_logits", "draft_logits")}
    x["draft_tokens"] = np.maximum(x["draft_tokens"], 0)

    @jax.jit
    def rule(x: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        zeros = jnp.zeros(requests, jnp.int32)
        sampling = SamplingParams(
            temperature=x["temperature"], top_k=zeros, top_p=zeros + 1.0, min_p=zeros + 0.0,
            seed=zeros.astype(jnp.uint32),
        )  # fmt: skip
        result = accept_standard(
            x["draft_tokens"], warp(x["draft_logits"], sampling),
            warp(x["target_logits"], sampling), x["verify_len"], x["uniforms"], x["noise"],
        )  # fmt: skip
        return result.accept_len, result.bonus_token

    _assert_equal(_run("standard", "auto", x), rule(x))


@pytest.mark.parametrize(
    ("method", "shards", "impl"),
    [("standard", 4, "ref"), ("coupled", 4, "ref"), ("coupled", 2, "interpret")],
)
def test_shards_of_the_vocabulary_exchange_five_numbers_per_row(method, shards, impl, rng):
    case = Case(verify_len=(0, 3, 2), temperature=(1.0, 0.7, 0.0), vocab=40)
    x = _coupled_operands(case, rng) if method == "coupled" else _operands(case, rng)
    if method == "standard":
        x["noise"] = rng.integers(0, 2**32, size=(3, 2), dtype=np.uint32)
    expected = _run(method, "ref", x)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:shards]), ("model",))
    specs = {k: P(None, None, "model") if "logits" in k else P() for k in x}

    def run(x: dict[str, jax.Array]) -> ops.Accepted:
        return ops.speculative_accept(**x, method=method, axis_name="model", impl=impl)

    sharded = jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=False)
    )
    _assert_equal(sharded(x), expected)
    program = sharded.lower(x).as_text()
    gathers = [line for line in program.splitlines() if "stablehlo.all_gather" in line]
    stated = [f"-> tensor<{shards}x5x3x4xi32>"]
    if method == "standard":
        stated += [f"-> tensor<{shards}x5x3x3xi32>", f"-> tensor<{shards}x5x3xi32>"]
    assert len(gathers) == len(stated)
    for line, shape in zip(gathers, stated, strict=True):
        assert shape in line
    assert "all_reduce" not in program and "collective_permute" not in program


def _packed(x: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The verified rows end to end, then rows of NaN; places of other rows point anywhere."""
    x, logits, lengths = dict(x), x["target_logits"], x["verify_len"] + 1
    request = np.repeat(np.arange(len(lengths)), lengths)
    offset = np.concatenate([np.arange(n) for n in lengths])
    index = np.full(logits.shape[:2], 10**6)
    index[request, offset] = np.arange(request.size)
    padding = np.full((3, logits.shape[-1]), np.nan, logits.dtype)
    x["target_logits"] = np.concatenate([logits[request, offset], padding])
    request, offset = (np.pad(n, (0, 3)) for n in (request, offset))
    return x | {
        k: n.astype(np.int32) for k, n in dict(request=request, offset=offset, index=index).items()
    }


@pytest.mark.parametrize(
    ("method", "impl"),
    [("standard", "ref"), ("standard", "interpret"), ("coupled", "interpret"), ("greedy", "ref")],
)
def test_packed_rows_give_the_same(method, impl, rng, capfd):
    case = CASES["mixed"]
    x = _coupled_operands(case, rng) if method == "coupled" else _operands(case, rng)
    if method == "greedy":
        x = {k: x[k] for k in ("target_logits", "draft_tokens", "verify_len")}
    expected = _run(method, "ref", x)
    packed = functools.partial(ops.speculative_accept_packed, method=method, impl=impl)
    if method == "standard":  # and drafts' logits that have been divided by the temperature
        scale = np.where(x["temperature"] > 0, x["temperature"], 1)
        x["draft_logits"] = x["draft_logits"] / scale[:, None, None]
        x["draft_temperature"] = np.ones_like(scale)
    _assert_equal(jax.device_get(jax.jit(packed)(**_packed(x))), expected)
    assert len(set(expected.accept_len)) > 1
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


def test_operands_of_another_method_are_refused(rng):
    x = _operands(CASES["vocabulary_is_one_tile"], rng)
    with pytest.raises(ValueError, match="'greedy' does not use draft_logits"):
        ops.speculative_accept(**x, method="greedy")
    with pytest.raises(ValueError, match="'standard' needs uniforms"):
        ops.speculative_accept(**x | {"uniforms": None}, method="standard")
    with pytest.raises(ValueError, match=r"draft_tokens is \(2, 1\); expected \(2, 2\)"):
        ops.speculative_accept(**x | {"draft_tokens": x["draft_tokens"][:, :1]}, method="standard")
    with pytest.raises(ValueError, match="method is 'block'"):
        ops.speculative_accept(**x, method="block")
    packed = _packed(x)
    with pytest.raises(ValueError, match=r"offset is \(4,\); expected \(8,\)"):
        ops.speculative_accept_packed(
            **packed | {"offset": packed["offset"][:4]}, method="standard"
        )
