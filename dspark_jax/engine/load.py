"""From names on a command line to an engine's models."""

import dataclasses
import platform
from pathlib import Path

import jax
import jax.numpy as jnp

from dspark_jax.checkpoint.deepseek import load_deepseek_draft
from dspark_jax.checkpoint.demo import cache_dir, resolve_model
from dspark_jax.checkpoint.draft import load_draft
from dspark_jax.checkpoint.fingerprint import fingerprint_target
from dspark_jax.checkpoint.target import load_target
from dspark_jax.config import DraftConfig, TargetConfig, read_config_json
from dspark_jax.config_deepseek import is_deepseek
from dspark_jax.draft.deepseek import DeepseekDraft
from dspark_jax.draft.dense import DenseDraft
from dspark_jax.draft.protocol import Draft
from dspark_jax.engine.fit import fit_draft, fit_target
from dspark_jax.engine.spread import place_pair
from dspark_jax.kv_cache import KV_CACHES
from dspark_jax.schedule import ScheduleConfig
from dspark_jax.sharding import MeshShape, make_mesh
from dspark_jax.state import Decoder
from dspark_jax.target.llama import LlamaTarget, stack_layers
from dspark_jax.tokenizer import Tokenizer
from dspark_jax.types import PairParams, Params, SharedHead

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
DEMO_DRAFT = Path(__file__).parent.parent / "pretrained" / "smollm2_dspark"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """A loaded target with its draft, ready to build decoders from."""

    name: str
    directory: Path
    target: LlamaTarget
    draft: Draft | None
    params: PairParams
    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]
    dtype: jnp.dtype
    mesh: jax.sharding.Mesh | None = None  # that `params` lie on

    @property
    def groups(self) -> int:
        """Groups of slots that an engine decodes side by side; its slots are a multiple."""
        return 1 if self.mesh is None else self.mesh.shape["data"]

    def decoder(
        self,
        schedule: ScheduleConfig | None = None,
        rejection_sample_method: str = "standard",
        *,
        plain: bool = False,
    ) -> Decoder:
        """A decoder over these models; `plain` leaves the draft out."""
        return Decoder(
            target=self.target,
            draft=None if plain else self.draft,
            schedule=schedule or ScheduleConfig(),
            rejection_sample_method=rejection_sample_method,
        )


def use_compilation_cache() -> None:
    """Keeps compiled programs in the cache directory, unless JAX was told where already.

    Compiled CPU programs use the instructions of the machine they were made on, so each host has
    a folder of its own.
    """
    if jax.config.jax_compilation_cache_dir is None:
        folder = cache_dir() / "compiled" / platform.node()
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def load_pair(
    model: str,
    draft: str,
    *,
    dtype: str = "float32",
    experts: str | None = None,
    kv_cache: str = "contiguous",
    mesh: MeshShape | None = None,
) -> Pair:
    """Loads a target and a draft.

    Args:
      model: name of a known target, or a directory in the Hugging Face layout or converted.
      draft: a directory of either kind; "none"; "random" for untrained weights (the text is still
        the target's); "auto" for the draft shipped for this model, if there is one.
      dtype: "float32" or "bfloat16", of weights and caches.
      experts: how a DeepSeek draft holds its routed experts: "packed" (FP4 or FP8, as stored),
        "float32" or "bfloat16"; None is `dtype`.
      kv_cache: the target's, "contiguous" or "paged".
      mesh: to spread the models over; None uses one device.

    Compiled programs are kept on disk from here on (see `use_compilation_cache`).

    Returns:
      The pair. Embedding and LM head exist once.

    Raises:
      FileNotFoundError: a directory is missing.
      ValueError: a checkpoint is damaged, the draft belongs to another target, or the mesh does
        not divide the models.
    """
    if mesh is not None:
        devices = make_mesh(mesh)
        with jax.default_device(host_device()):  # they need not fit one device
            pair = load_pair(model, draft, dtype=dtype, experts=experts, kv_cache=kv_cache)
        return spread_pair(pair, devices)
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}; expected one of {sorted(DTYPES)}.")
    if kv_cache not in KV_CACHES:
        raise ValueError(f"kv_cache={kv_cache!r}; expected one of {KV_CACHES}.")
    use_compilation_cache()
    directory = resolve_model(model)
    config, params = load_target(directory, dtype=DTYPES[dtype])
    if jax.default_backend() != "cpu":
        params = stack_layers(params)
    tokenizer = Tokenizer(directory)
    shared = LlamaTarget(config=config).shared_head(params)
    model_of_draft, draft_params, path = None, None, None
    if draft == "random":
        model_of_draft = DenseDraft(config=random_draft_config(config))
        draft_params = model_of_draft.init(jax.random.key(0), DTYPES[dtype])
    elif (path := _draft_path(draft, directory)) is not None:
        model_of_draft, draft_params, shared = _load_draft(
            path, directory, config, shared, dtype=DTYPES[dtype], experts=experts
        )
    if experts is not None and not isinstance(model_of_draft, DeepseekDraft):
        raise ValueError(
            f"experts={experts!r} is about the routed experts of a DeepSeek draft, but the draft "
            f"is {draft!r}; leave it out."
        )
    taps = model_of_draft.config.target_layer_ids if model_of_draft else ()
    ids = {*config.eos_token_ids, tokenizer.eos_token_id} - {None}
    return Pair(
        name=directory.name,
        directory=directory,
        target=LlamaTarget(config=config, tap_layer_ids=taps, paged=kv_cache == "paged"),
        draft=model_of_draft,
        params=PairParams(
            target=params, draft=draft_params, shared=shared if model_of_draft else None
        ),
        tokenizer=tokenizer,
        stop_ids=tuple(sorted(ids)),
        dtype=DTYPES[dtype],
    )


def _load_draft(
    path: Path,
    target_directory: Path,
    target: TargetConfig,
    shared: SharedHead,
    *,
    dtype: jnp.dtype,
    experts: str | None,
) -> tuple[Draft, Params, SharedHead]:
    """A draft of either kind for a target, and the head to use with it."""
    if is_deepseek(read_config_json(path)):
        config, params, _ = load_deepseek_draft(
            path, dtype=dtype, experts=experts, target=(target, shared)
        )
        return DeepseekDraft(config=config), params, shared
    config, params, shared = load_draft(
        path, target, shared, dtype=dtype,
        fingerprint=fingerprint_target(target_directory, name=target_directory.name),
    )  # fmt: skip
    return DenseDraft(config=config), params, shared


def host_device() -> jax.Device | None:
    """A device in the host's memory, where JAX was given one."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS names other platforms only
        return None


def spread_pair(pair: Pair, mesh: jax.sharding.Mesh) -> Pair:
    """Puts models on a mesh, with heads and MLPs made to divide over it (see `fit_target`).

    Args:
      pair: on the host or one device.
      mesh: with axes `data`, `expert` and `model`.

    Returns:
      The pair on the mesh.

    Raises:
      ValueError: the mesh does not divide the models.
    """
    devices, params = mesh.shape["model"], pair.params
    config, target = fit_target(pair.target.config, params.target, devices)
    draft, draft_params = pair.draft, params.draft
    if isinstance(draft, DenseDraft):
        draft_config, draft_params = fit_draft(draft.config, draft_params, devices)
        draft = DenseDraft(config=draft_config)
    params = params.replace(target=target, draft=draft_params)
    return dataclasses.replace(
        pair, mesh=mesh, draft=draft, params=place_pair(mesh, params),
        target=dataclasses.replace(pair.target, config=config),
    )  # fmt: skip


def random_draft_config(target: TargetConfig) -> DraftConfig:
    """A small untrained draft for any target: two layers, blocks of 5, all heads present."""
    layers = target.num_hidden_layers
    taps = sorted({layers // 4, layers // 2, max(layers - 2, 0)})
    return DraftConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_hidden_layers=2,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=target.head_dim,
        intermediate_size=target.intermediate_size,
        rms_norm_eps=target.rms_norm_eps,
        rope=target.rope,
        block_size=5,
        mask_token_id=0,
        target_layer_ids=tuple(taps),
        markov_rank=min(64, target.hidden_size),
        markov_head_type="vanilla",
        enable_confidence_head=True,
        confidence_head_with_markov=True,
        num_target_layers=layers,
    )


def _draft_path(draft: str, target_directory: Path) -> Path | None:
    if draft == "none":
        return None
    if draft == "auto":
        demo = target_directory.name == "smollm2-135m-instruct" and DEMO_DRAFT.is_dir()
        return DEMO_DRAFT if demo else None
    path = Path(draft)
    if not path.is_dir():
        raise FileNotFoundError(
            f"draft {draft!r} is not a directory; expected a checkpoint directory, or one of "
            "'auto', 'none', 'random'."
        )
    return path
