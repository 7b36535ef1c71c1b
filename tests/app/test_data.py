"""Finding, reading and splitting text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardwright.app.data import STDLIB_SKIPPED, Corpus, DataError, find_documents, load_corpus
from shardwright.app.tokenizer import load_tokenizer

BYTES = load_tokenizer("bytes")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in {
        "b.txt": b"bb",
        "a/z.py": b"zz",
        "a/y.md": b"yy",
        "image.png": b"\x89PNG",
        ".hidden/x.txt": b"xx",
        "a/__pycache__/w.py": b"ww",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path


def names(folder: Path, *paths: str) -> list[str]:
    documents = find_documents([str(folder / path) for path in paths])
    return [document.relative_to(folder).as_posix() for document in documents]


def text_of(corpus: Corpus) -> str:
    return BYTES.decode([*corpus.train.tolist(), *corpus.validation.tolist()])


def test_a_folder_gives_its_text_files_sorted_by_relative_path(folder: Path) -> None:
    assert names(folder, "") == ["a/y.md", "a/z.py", "b.txt"]


def test_paths_keep_their_order_and_count_once(folder: Path) -> None:
    assert names(folder, "b.txt", "a", "b.txt") == ["b.txt", "a/y.md", "a/z.py"]


def test_a_pattern_is_sorted_and_may_reach_down(folder: Path) -> None:
    assert names(folder, "a/*.[pm]*") == ["a/y.md", "a/z.py"]
    assert "a/z.py" in names(folder, "**/*.py")


def test_a_named_file_may_have_any_suffix(folder: Path) -> None:
    assert names(folder, "image.png") == ["image.png"]


def test_the_default_is_the_source_of_the_standard_library() -> None:
    documents = find_documents([])
    assert "dataclasses.py" in {document.name for document in documents}
    assert {document.suffix for document in documents} == {".py"}
    assert documents == find_documents([])
    assert not any("site-packages" in document.parts for document in documents)
    assert "test" in STDLIB_SKIPPED


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing.txt", "found nothing there"),
        ("*.nothing", "found none; check the pattern"),
        ("empty", "found none with a known suffix"),
    ],
)
def test_paths_that_name_no_text_are_refused(tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=message):
        find_documents([str(tmp_path / path)])


def test_the_split_loses_and_shares_no_token(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghij")
    (tmp_path / "b.txt").write_text("klmnopqrst")
    corpus = load_corpus(find_documents([str(tmp_path)]), BYTES, validation_fraction=0.25)
    assert BYTES.decode(corpus.train.tolist()) == "abcdefghijklmno"
    assert BYTES.decode(corpus.validation.tolist()) == "pqrst"
    assert (corpus.num_documents, corpus.num_text_bytes) == (2, 20)
    assert corpus.train.dtype == np.uint16
    assert not corpus.is_cut


def test_equal_corpora_have_equal_fingerprints_and_others_do_not(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("abcdefghij")
    halves = [load_corpus([path], BYTES, validation_fraction=0.5).fingerprint() for _ in range(2)]
    assert halves[0] == halves[1]
    assert halves[0] != load_corpus([path], BYTES, validation_fraction=0.2).fingerprint()


@pytest.mark.parametrize(
    ("max_bytes", "text"), [(None, "aé🙂b"), (8, "aé🙂b"), (7, "aé🙂"), (6, "aé"), (2, "a")]
)
def test_a_bound_on_bytes_cuts_between_characters(
    tmp_path: Path, max_bytes: int | None, text: str
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("aé🙂b", encoding="utf-8")
    corpus = load_corpus([path], BYTES, max_bytes=max_bytes, bad_bytes="error")
    assert text_of(corpus) == text
    assert corpus.is_cut == (text != "aé🙂b")


def test_a_bound_on_bytes_covers_all_files_together(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.write_text(path.name * 4)
    corpus = load_corpus(paths, BYTES, max_bytes=6)
    assert text_of(corpus) == "aaaabb"
    assert corpus.is_cut
    assert not load_corpus(paths, BYTES, max_bytes=12).is_cut


@pytest.fixture
def bad_files(tmp_path: Path) -> list[Path]:
    good, bad = tmp_path / "good.txt", tmp_path / "latin-1.txt"
    good.write_text("fine \N{REPLACEMENT CHARACTER}")
    bad.write_bytes(b"caf\xe9 cr\xe8me")
    return [good, bad]


def test_bad_bytes_are_replaced_and_counted(bad_files: list[Path]) -> None:
    corpus = load_corpus(bad_files, BYTES, bad_bytes="replace")
    assert text_of(corpus).endswith("caf\N{REPLACEMENT CHARACTER} cr\N{REPLACEMENT CHARACTER}me")
    assert (corpus.num_documents, corpus.num_bad_documents, corpus.num_bad_sequences) == (2, 1, 2)


def test_files_with_bad_bytes_can_be_left_out(bad_files: list[Path]) -> None:
    corpus = load_corpus(bad_files, BYTES, bad_bytes="skip")
    assert text_of(corpus) == "fine \N{REPLACEMENT CHARACTER}"
    assert (corpus.num_documents, corpus.num_bad_documents) == (1, 1)


def test_bad_bytes_can_be_an_error_that_names_file_and_place(bad_files: list[Path]) -> None:
    with pytest.raises(DataError, match=r"latin-1\.txt' holds other bytes, first at byte 3"):
        load_corpus(bad_files, BYTES, bad_bytes="error")


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        (b"some text\0and more", "a zero byte, at 9"),
        (bytes(range(1, 256)) * 4, "characters that are no UTF-8"),
        ("Она была хороша".encode("cp1251"), "characters that are no UTF-8"),
        ("plain words".encode("utf-16"), "a zero byte"),
    ],
)
def test_what_is_no_text_is_refused_or_left_out(tmp_path: Path, raw: bytes, found: str) -> None:
    good, bad = tmp_path / "good.txt", tmp_path / "bad.bin"
    good.write_text("fine")
    bad.write_bytes(raw)
    with pytest.raises(DataError, match=rf"bad\.bin' holds .*{found}.*data\.bad_bytes to 'skip'"):
        load_corpus([good, bad], BYTES)
    corpus = load_corpus([good, bad], BYTES, bad_bytes="skip")
    assert (text_of(corpus), corpus.num_bad_documents) == ("fine", 1)


def test_a_path_that_the_system_refuses_is_told_as_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must be readable; found: File name too long"):
        find_documents([str(tmp_path / ("a" * 300))])


def test_files_without_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.touch()
    with pytest.raises(DataError, match="must hold text; found none"):
        load_corpus([path], BYTES)


def test_a_file_that_vanished_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.txt' must be readable"):
        load_corpus([tmp_path / "gone.txt"], BYTES)
