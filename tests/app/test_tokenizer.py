"""Bytes and Hugging Face tokenizers."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from shardwright.app.tokenizer import load_tokenizer, token_dtype
from shardwright.core.errors import SpecError


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"<s>": 0, "hello": 1, "world": 2, "<unk>": 9}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("text", ["", "def f():\n\treturn 1\n", "naïve 量子 🙂"])
def test_bytes_come_back_as_the_same_text(text: str) -> None:
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16
    assert len(ids) == len(text.encode())
    assert all(int(value) < tokenizer.vocab_size for value in ids)
    assert tokenizer.decode(ids.tolist()) == text


def test_half_a_character_decodes_to_a_replacement() -> None:
    assert load_tokenizer("bytes").decode([0x61, 0xC3]) == "a\N{REPLACEMENT CHARACTER}"


def test_a_hugging_face_file_encodes_without_special_tokens(tokenizer_file: Path) -> None:
    tokenizer = load_tokenizer(str(tokenizer_file))
    ids = tokenizer.encode("hello world")
    assert ids.tolist() == [1, 2]
    assert ids.dtype == np.uint16
    assert tokenizer.decode([1, 2]) == "hello world"


def test_the_vocabulary_reaches_the_largest_id_across_gaps(tokenizer_file: Path) -> None:
    assert load_tokenizer(str(tokenizer_file)).vocab_size == 10


def test_a_folder_stands_for_the_file_in_it(tokenizer_file: Path) -> None:
    assert load_tokenizer(str(tokenizer_file.parent)).vocab_size == 10


def test_ids_take_two_bytes_while_they_fit() -> None:
    assert token_dtype(65_536) == np.uint16
    assert token_dtype(65_537) == np.uint32


def test_a_missing_file_is_named() -> None:
    with pytest.raises(SpecError, match=r"found 'nowhere\.json', which is no file"):
        load_tokenizer("nowhere.json")


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(SpecError, match="could not be read"):
        load_tokenizer(str(path))


def test_a_missing_package_comes_with_the_command_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(SpecError, match=r"pip install 'shardwright\[hf\]'"):
        load_tokenizer(str(path))
