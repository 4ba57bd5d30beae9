"""Text to samples, samples to crops, features on disk, overrides of a config."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoint.target import load_target
from dspark_jax.target.llama import LlamaTarget
from dspark_jax.train.config import DataConfig, DraftShape, TrainConfig, load_config
from dspark_jax.train.crops import CropSource, crop_batches, list_crops
from dspark_jax.train.data import ChatEncoder, Sample, load_samples
from dspark_jax.train.features import extract_features, open_features
from tests.models import write_target


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def encoder(target_dir) -> ChatEncoder:
    return ChatEncoder(target_dir)


def talk(*contents: str, **fields) -> dict:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]
    return {"id": "x", "conversations": messages} | fields


def text_of(encoder: ChatEncoder, sample: Sample, loss: bool) -> str:
    ids = sample.tokens[sample.loss_mask == loss].tolist()
    return encoder.tokenizer.decode(ids, skip_special_tokens=False)


def test_the_loss_is_on_answers_with_their_end_marker(encoder):
    sample = encoder.encode(talk("the dog", "the fox", "and?", "a cat"), max_length=1000)
    assert text_of(encoder, sample, True) == "the fox<|im_end|>\na cat<|im_end|>\n"
    prompt = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(encoder, sample, False) == prompt.format("the dog") + prompt.format("and?")


def test_a_truncated_answer_has_no_end_marker(encoder):
    sample = encoder.encode(talk("the dog", "the fox", truncated=True), max_length=1000)
    assert text_of(encoder, sample, True) == "the fox"


def test_user_turns_count_where_the_target_wrote_them(encoder):
    roles = ("user", "assistant")
    sample = encoder.encode(talk("the dog", "the fox"), max_length=1000, roles=roles)
    assert text_of(encoder, sample, True) == "the dog<|im_end|>\nthe fox<|im_end|>\n"
    plain = encoder.encode(talk("the dog", "the fox"), max_length=1000)
    assert plain.tokens.tolist() == sample.tokens.tolist()


def test_samples_are_cut_and_short_ones_dropped(encoder, tmp_path):
    path = tmp_path / "data.jsonl"
    lines = [talk("a", "the quick brown fox jumps over the lazy dog"), talk("a", "no")]
    path.write_text("\n\n".join(json.dumps(line) for line in lines))
    samples = load_samples(path, encoder, max_length=1000, min_loss_tokens=5)
    assert len(samples) == 1
    cut = load_samples(path, encoder, max_length=20, min_loss_tokens=1)
    assert all(len(s.tokens) <= 20 for s in cut)
    with pytest.raises(ValueError, match="at least 1000"):
        load_samples(path, encoder, max_length=1000, min_loss_tokens=1000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"id": 1}', "no list `conversations`"),
        ("[1]", "line 1: got a list"),
        ('{"id": ', "line 1: not valid JSON"),
        ('{"conversations": [{"role": "user"}]}', "message 0 lacks"),
    ],
)
def test_damaged_lines_are_named(encoder, tmp_path, text, message):
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_samples(path, encoder, max_length=100)


def test_missing_files_are_named(tmp_path, encoder):
    with pytest.raises(FileNotFoundError, match="nowhere.jsonl"):
        load_samples(tmp_path / "nowhere.jsonl", encoder, max_length=100)
    with pytest.raises(FileNotFoundError, match="tokenizer.json"):
        ChatEncoder(tmp_path)


def sample_of(tokens, mask) -> Sample:
    return Sample(id="s", tokens=np.array(tokens, np.int32), loss_mask=np.array(mask, bool))


def test_crops_cover_each_anchor_once():
    mask = [0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 0, 1]
    crops = list_crops([sample_of(range(12), mask)], [0], 3)
    anchors = [c.first + o for c in crops for o in c.offsets]
    assert anchors == [2, 3, 4, 7, 8]
    assert all(c.offsets[-1] < 3 for c in crops)


def test_repeated_text_makes_no_anchors():
    tokens = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7, 9]
    crops = list_crops([sample_of(tokens, [1] * 12)], [0], 32, skip_repeats=3)
    assert [c.first + o for c in crops for o in c.offsets] == [0, 1, 2, 3, 9, 10]


@pytest.fixture
def store(target_dir, tmp_path):
    config, params = load_target(target_dir)
    target = LlamaTarget(config=config, tap_layer_ids=(0, 1))
    rng = np.random.default_rng(0)
    samples = [
        Sample(id=str(n), tokens=rng.integers(3, 320, n, np.int32), loss_mask=np.ones(n, bool))
        for n in (30, 17, 70, 9)
    ]
    lines = []
    extract_features(
        target, params, samples, tmp_path / "f", rows_per_batch=128, progress=lines.append
    )
    assert len(lines) == 1
    return target, params, samples, tmp_path / "f"


def test_stored_features_are_those_of_a_forward(store):
    target, params, samples, directory = store
    features = open_features(directory)
    assert features.done == 4 and features.ids == ("30", "17", "70", "9")
    for i, sample in enumerate(samples):
        tokens = jnp.asarray(sample.tokens)[None]
        cache = target.make_cache(1, 1, jnp.float32)
        out = target.forward(params, tokens, cache, cache_len=jnp.zeros(1, jnp.int32))
        rows = slice(features.offsets[i], features.offsets[i + 1])
        np.testing.assert_allclose(
            features.taps[rows], out.context_features[0], rtol=2e-3, atol=2e-3
        )
        np.testing.assert_allclose(features.hidden[rows], out.hidden[0], rtol=2e-3, atol=2e-3)


def test_features_of_other_samples_are_refused(store):
    target, params, samples, directory = store
    with pytest.raises(ValueError, match="other samples or layers"):
        extract_features(target, params, samples[:2], directory)
    with (directory / "taps.bin").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(ValueError, match="truncated"):
        open_features(directory)
    with pytest.raises(FileNotFoundError, match="no features"):
        open_features(directory / "elsewhere")


def test_a_crop_is_a_piece_of_its_document(store):
    _, _, samples, directory = store
    features = open_features(directory)
    crops = list_crops(samples, [2], 8)
    source = CropSource(
        features, samples, crops, window=10, anchors=8, block_size=4, taps=[1]
    )
    crop = source[3]  # anchors 24..31
    assert crop["anchors"].tolist() == list(range(10, 18)) and crop["keep"].all()
    np.testing.assert_array_equal(crop["tokens"], samples[2].tokens[14:36])
    assert crop["positions"].tolist() == list(range(14, 36))
    first = features.offsets[2]
    expected = np.asarray(features.taps[first + 14 : first + 36, 32:], np.float32)
    np.testing.assert_array_equal(crop["context_features"], expected)
    last = source[len(source) - 1]  # the text ends inside the crop
    assert last["segments"].sum() < len(last["segments"])
    assert not last["loss_mask"][last["segments"] == 0].any()


def test_the_order_of_crops_can_be_stored(store):
    _, _, samples, directory = store
    features = open_features(directory)
    crops = list_crops(samples, range(4), 4)
    source = CropSource(
        features, samples, crops, window=4, anchors=4, block_size=2, taps=[0, 1]
    )
    stream = crop_batches(source, batch_size=3, seed=1)
    for _ in range(5):
        next(stream)
    state = json.loads(json.dumps(stream.get_state()))
    expected = [next(stream)["tokens"] for _ in range(12)]
    again = crop_batches(source, batch_size=3, seed=1)
    again.set_state(state)
    for batch in expected:
        np.testing.assert_array_equal(next(again)["tokens"], batch)


CONFIG_TEXT = """
from dspark_jax.train.config import DataConfig, DraftShape, TrainConfig
CONFIG = TrainConfig(
    target="t", output_dir="o", steps=5, data=DataConfig(train_data="d"),
    draft=DraftShape(mask_token_id=1, target_layer_ids=(0,)),
)
"""


def test_overrides_reach_nested_fields(tmp_path):
    path = tmp_path / "c.py"
    path.write_text(CONFIG_TEXT)
    config = load_config(
        path, ["loss.ce=0.5", "draft.target_layer_ids=(0, 3)", "target=some/dir", "steps=7"]
    )
    assert config.loss.ce == 0.5 and config.draft.target_layer_ids == (0, 3)
    assert config.target == "some/dir" and config.steps == 7
    assert load_config(path).loss.ce == 0.1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("loss.cee=1", "no field 'cee'"),
        ("steps", "expected a.b=value"),
        ("steps.x=1", "no fields"),
        ("data.features_dir=f", "sliding_window"),
        ("draft.draft_vocab_size=9", "features_dir"),
    ],
)
def test_bad_overrides_are_refused(tmp_path, override, message):
    path = tmp_path / "c.py"
    path.write_text(CONFIG_TEXT)
    with pytest.raises(ValueError, match=message):
        load_config(path, [override])


def test_a_draft_must_not_tap_the_last_layer(target_dir):
    config, _ = load_target(target_dir)
    shape = DraftShape(mask_token_id=0, target_layer_ids=(0, 2), num_hidden_layers=1)
    with pytest.raises(ValueError, match="taps layer 2"):
        shape.build(config)


def test_config_files_need_a_config(tmp_path):
    path = tmp_path / "c.py"
    path.write_text("CONFIG = 3")
    with pytest.raises(ValueError, match="TrainConfig"):
        load_config(path)
    with pytest.raises(FileNotFoundError, match="nowhere.py"):
        load_config(tmp_path / "nowhere.py")


def test_shipped_configs_load():
    from pathlib import Path

    folder = Path(__file__).resolve().parents[2] / "configs"
    paths = sorted(folder.glob("*.py"))
    assert paths
    for path in paths:
        assert isinstance(load_config(path), TrainConfig)
        assert isinstance(load_config(path).data, DataConfig)
