"""Small pairs whose axes divide over eight devices, and engines on them."""

import dataclasses
import math
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoint.draft import draft_rules
from dspark_jax.checkpoint.target import target_rules
from dspark_jax.config import DraftConfig, MoeConfig, RopeConfig, TargetConfig
from dspark_jax.draft.dense import DenseDraft
from dspark_jax.engine import programs
from dspark_jax.engine.core import Engine
from dspark_jax.engine.requests import Request
from dspark_jax.engine.spread import place_pair
from dspark_jax.sharding import make_mesh, parse_mesh
from dspark_jax.state import Decoder
from dspark_jax.target.llama import LlamaTarget, stack_layers
from dspark_jax.types import PairParams
from tests.models import random_params

VOCAB, BLOCK, CAPACITY, SLOTS = 4096, 4, 30, 4
Pair = tuple[LlamaTarget, DenseDraft, PairParams]


def tiny_pair(*, moe: bool = False, kv_heads: int = 8, heads: int = 8) -> Pair:
    """A target of two layers and a draft of one, whose drafts it sometimes accepts.

    Args:
      moe: the target has eight experts, two of them per token.
      kv_heads: G of both.
      heads: N of both.

    Returns:
      Target, draft, parameters with stacked layers.
    """
    dims = dict(
        vocab_size=VOCAB, hidden_size=32, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=8, intermediate_size=64, rms_norm_eps=1e-5, rope=RopeConfig(),
    )  # fmt: skip
    experts = MoeConfig(
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True
    )  # fmt: skip
    target_config = TargetConfig(
        model_type="qwen3_moe" if moe else "llama", num_hidden_layers=2, qk_norm=moe,
        tie_word_embeddings=False, moe=experts if moe else None, **dims,
    )  # fmt: skip
    draft_config = DraftConfig(
        num_hidden_layers=1, block_size=BLOCK, mask_token_id=0, target_layer_ids=(-1, 0),
        markov_rank=32, markov_head_type="vanilla", enable_confidence_head=True,
        confidence_head_with_markov=True, **dims,
    )  # fmt: skip
    target = LlamaTarget(config=target_config, tap_layer_ids=(-1, 0))
    params = stack_layers(random_params(target_rules(target_config), seed=1, scale=8.0))
    drafted = random_params(draft_rules(draft_config), seed=2, scale=8.0)
    # The bias follows what the target says after a token without any context, so some drafts pass.
    norms = np.sqrt(np.mean(params["embedding"] ** 2, axis=1, keepdims=True))
    drafted["markov"] = {"w1": params["embedding"] / norms, "w2": 2.0 * params["head"]}
    shared = target.shared_head(params)
    pair = PairParams(target=params, draft=drafted, shared=shared)
    return target, DenseDraft(config=draft_config), jax.tree.map(jnp.asarray, pair)


def make_engine(pair: Pair, mesh: str | None, **decoder: object) -> Engine:
    """An engine that compiles one width and one bucket, on a mesh such as "data=2,model=4"."""
    target, draft, params = pair
    devices = make_mesh(parse_mesh(mesh)) if mesh else None
    if devices is not None:
        params = place_pair(devices, params)
    made = Decoder(target=target, draft=draft, **decoder)
    with (
        mock.patch.object(programs, "row_widths", lambda slots: (slots,)),
        mock.patch.object(programs, "row_buckets", lambda rows, k, adaptive: (rows * (k + 1),)),
    ):
        return Engine(made, params, slots=SLOTS, capacity=CAPACITY, mesh=devices)


def requests(count: int = 6) -> list[Request]:
    """Prompts of different lengths; every other one is sampled, the first is greedy."""
    rng = np.random.default_rng(3)
    return [
        Request(
            prompt_ids=tuple(map(int, rng.integers(1, VOCAB, 1 + 4 * i % 17))), max_tokens=10,
            temperature=float(i % 2), seed=i, top_k=50 * (i % 4 == 3),
        )
        for i in range(count)
    ]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Collective:
    """One communication of a compiled program."""

    kind: str
    shapes: tuple[tuple[int, ...], ...]  # of its results, on one device
    where: str  # the operation it belongs to

    @property
    def size(self) -> int:
        """Values in its largest result."""
        return max((math.prod(shape) for shape in self.shapes), default=0)


def collectives(text: str) -> list[Collective]:
    """The communication in a compiled program's text."""
    found = []
    for line in text.splitlines():
        if match := _COLLECTIVE.search(line):
            shapes = tuple(
                tuple(int(n) for n in dims.split(",") if n)
                for dims in re.findall(r"\w+\[([\d,]*)\]", match["shapes"])
            )
            name = re.search(r'op_name="([^"]*)"', line)
            found.append(Collective(match["kind"], shapes, name[1] if name else ""))
    return found


_COLLECTIVE = re.compile(
    r" = (?P<shapes>\(.*?\)|\S+) "
    r"(?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)
