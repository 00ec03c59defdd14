"""Equal tokenizers and files have equal fingerprints, however they are written down."""

import copy
import json

import pytest

from outrider.common.errors import ModelError
from outrider.common.models.fingerprint import directory_fingerprint, num_tokens, tokenizer_fingerprint

TOKENIZER = {
    "version": "1.0",
    "added_tokens": [
        {"id": 5, "content": "<end>", "special": True},
        {"id": 0, "content": "a", "special": False},
    ],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "é": 2, "ab": 3, "aba": 4}, "merges": ["a b", "ab a"]},
}
GOLDEN = "bce3b203948fcd784c877243be6eaf96af4f9066fdbb5fdabc79df72459e56d6"


@pytest.fixture
def written(tmp_path):
    def write(change=lambda content: None, indent=None):
        content = copy.deepcopy(TOKENIZER)
        change(content)
        path = tmp_path / "tokenizer.json"
        path.write_text(json.dumps(content, indent=indent), encoding="utf-8")
        return path

    return write


def test_the_fingerprint_is_the_golden_one(written):
    assert tokenizer_fingerprint(written()) == GOLDEN


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.update(version="2.0", truncation={"max_length": 5}),
        lambda c: c["model"].update(vocab=dict(reversed(c["model"]["vocab"].items()))),
        lambda c: c["model"].update(merges=[["a", "b"], ["ab", "a"]]),
        lambda c: c["added_tokens"].reverse(),
        lambda c: c.update(post_processor={"type": "ByteLevel"}),
    ],
)
def test_what_does_not_change_the_mapping_does_not_change_the_fingerprint(written, change):
    expected = tokenizer_fingerprint(written())
    assert tokenizer_fingerprint(written(change, indent=2)) == expected


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["model"]["vocab"].update(b=2, é=1),
        lambda c: c["model"]["merges"].reverse(),
        lambda c: c["added_tokens"][0].update(special=False),
        lambda c: c["added_tokens"][0].update(id=6),
        lambda c: c.update(normalizer={"type": "NFC"}),
        lambda c: c["pre_tokenizer"].update(add_prefix_space=True),
    ],
)
def test_what_changes_the_mapping_changes_the_fingerprint(written, change):
    expected = tokenizer_fingerprint(written())
    assert tokenizer_fingerprint(written(change)) != expected


def test_the_number_of_tokens_is_the_highest_id_plus_one_added_tokens_included(written):
    assert num_tokens(written()) == 6
    assert num_tokens(written(lambda c: c.update(added_tokens=[]))) == 5


def test_a_unigram_vocabulary_is_a_list(written):
    def pieces(first_score):
        return lambda c: c.update(model={"vocab": [["a", first_score], ["b", -2.0]]}, added_tokens=[])

    assert num_tokens(written(pieces(-1.0))) == 2
    assert tokenizer_fingerprint(written(pieces(-1.0))) != tokenizer_fingerprint(written(pieces(-1.5)))


def test_a_real_tokenizers_fingerprint_survives_loading_and_saving(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(["def main(): return café"] * 5, trainer)
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    tokenizer.save(str(first))
    tokenizers.Tokenizer.from_file(str(first)).save(str(second), pretty=True)
    assert tokenizer_fingerprint(first) == tokenizer_fingerprint(second)
    assert num_tokens(first) == tokenizer.get_vocab_size()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read the tokenizer .*: No such file"),
        ("{", "is not JSON"),
        ("[]", "is not a tokenizer"),
        ('{"model": {"vocab": 3}}', "is not a tokenizer"),
        ('{"model": {"vocab": {"a": "x"}}}', "malformed"),
        ('{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1}]}', "malformed"),
    ],
)
def test_a_bad_tokenizer_file_is_a_model_error(tmp_path, text, message):
    path = tmp_path / "tokenizer.json"
    if text is not None:
        path.write_text(text)
    for read in (tokenizer_fingerprint, num_tokens):
        with pytest.raises(ModelError, match=message):
            read(path)


def test_a_directory_fingerprint_is_of_names_and_content(tmp_path):
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    config.write_text("{}")
    weights.write_bytes(b"12")
    before = directory_fingerprint([config, weights])
    assert directory_fingerprint([weights, config]) == before
    weights.write_bytes(b"13")
    assert directory_fingerprint([config, weights]) != before
    with pytest.raises(ModelError, match="No such file"):
        directory_fingerprint([config, tmp_path / "missing"])
