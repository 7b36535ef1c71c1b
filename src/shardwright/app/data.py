"""Text files to one array of token ids, and its split into training and validation.

`find_documents` lists the files, cheaply and without reading them, so that the command line can
refuse bad paths before any rank starts; `load_corpus` reads, decodes and encodes them. Which
windows of the array a rank trains on is decided by `shardwright.app.batches`.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from shardwright.app.tokenizer import token_dtype
from shardwright.core.errors import ShardwrightError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from shardwright.app.tokenizer import Tokenizer

BadBytes = Literal["error", "replace", "skip"]

TEXT_SUFFIXES = frozenset(
    ".txt .text .md .rst .tex .py .pyi .ipynb .c .h .cc .cpp .hpp .cu .rs .go .java .js .ts .rb "
    ".sh .sql .html .css .xml .json .jsonl .yaml .yml .toml .ini .cfg .csv .tsv".split()
)
"""Files taken from a folder; a file named outright or by a pattern may have any suffix."""

STDLIB_SKIPPED = frozenset(
    "site-packages dist-packages __pycache__ test tests idlelib lib2to3 turtledemo "
    "encodings pydoc_data".split()
)
"""Folders of the standard library left out: foreign packages, tests, demos, bare tables."""

_MOST_REPLACED = 0.3
"""Share of a text's characters that may stand for bytes that are no UTF-8; no language in another
encoding stays below it that doesn't use mostly ASCII."""

_GLOB_CHARACTERS = frozenset("*?[")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class DataError(ShardwrightError, ValueError):
    """The training text is missing, unreadable or too short."""


class TooShortError(DataError):
    """A part of the data holds no sequence; raised on all ranks alike."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Encoded text.

    Attributes:
        train: 1-D token ids.
        validation: 1-D token ids, the end of the text; shares no token with `train`.
        num_documents: Files read.
        num_text_bytes: UTF-8 bytes of the text, both parts.
        num_bad_documents: Files that held bytes that are not UTF-8.
        num_bad_sequences: Byte sequences replaced by U+FFFD.
        is_cut: More text was there than the bound on bytes let in.
    """

    train: NDArray[np.unsignedinteger]
    validation: NDArray[np.unsignedinteger]
    num_documents: int
    num_text_bytes: int
    num_bad_documents: int = 0
    num_bad_sequences: int = 0
    is_cut: bool = False

    def fingerprint(self) -> str:
        """Hash all tokens; equal on two ranks exactly if they hold the same data."""
        digest = hashlib.sha256(self.train.tobytes())
        digest.update(b"|")
        digest.update(self.validation.tobytes())
        return digest.hexdigest()


def find_documents(paths: Sequence[str]) -> list[Path]:
    """List the files that `paths` name, in a reproducible order.

    Args:
        paths: Files, folders (searched recursively for `TEXT_SUFFIXES`) or glob patterns, taken
            in the order given, and sorted by relative path within each; none for the source of
            the running Python's standard library.

    Returns:
        Distinct files; at least one.

    Raises:
        DataError: If a path doesn't exist, or names no text.
    """
    if not paths:
        return _stdlib_documents()
    found: dict[Path, Path] = {}
    for path in paths:
        try:
            documents = _expand(path)
        except OSError as error:
            raise DataError(
                f"data path {path!r} must be readable; found: {error.strerror}; check the path"
            ) from error
        for document in documents:
            found.setdefault(document.resolve(), document)
    return list(found.values())


def load_corpus(
    documents: Iterable[Path],
    tokenizer: Tokenizer,
    *,
    max_bytes: int | None = None,
    bad_bytes: BadBytes = "replace",
    validation_fraction: float = 0.05,
) -> Corpus:
    """Read, decode and encode files, and split the tokens.

    Args:
        documents: The files, in order.
        tokenizer: Turns each file's text into ids; files are joined without a separator.
        max_bytes: Stop after this many bytes of files, cutting the last file; None reads all.
        bad_bytes: For bytes that are not UTF-8: `"error"` raises, `"replace"` puts U+FFFD where
            these are few, `"skip"` leaves the whole file out; a binary file, too.
        validation_fraction: Share of the tokens, from the end, kept for validation.

    Returns:
        The corpus; its counts say what was replaced or left out.

    Raises:
        DataError: If a file can't be read, is binary, holds bad bytes where these are errors, or
            all files together hold no text.
    """
    pieces: list[NDArray[np.unsignedinteger]] = []
    num_text_bytes = num_bad_documents = num_bad_sequences = 0
    reader = _Reader(max_bytes)
    for path, raw in reader.read(documents):
        text, num_bad = _decode(path, raw, bad_bytes)
        num_bad_documents += num_bad > 0
        if text is not None:
            pieces.append(tokenizer.encode(text))
            num_text_bytes += len(text.encode("utf-8"))
            num_bad_sequences += num_bad
    if not num_text_bytes:
        raise DataError(
            f"the data must hold text; found none ({num_bad_documents} files with bad bytes); "
            f"give other files, or set data.bad_bytes to 'replace'"
        )
    tokens = np.concatenate(pieces).astype(token_dtype(tokenizer.vocab_size), copy=False)
    cut = len(tokens) - round(len(tokens) * validation_fraction)
    return Corpus(
        train=tokens[:cut],
        validation=tokens[cut:],
        num_documents=len(pieces),
        num_text_bytes=num_text_bytes,
        num_bad_documents=num_bad_documents,
        num_bad_sequences=num_bad_sequences,
        is_cut=reader.is_cut,
    )


def _stdlib_documents() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    documents = [path for path in _walk(root, STDLIB_SKIPPED) if path.suffix == ".py"]
    if not documents:
        raise DataError(
            f"the default data is the source of Python's standard library; found no .py file in "
            f"{root}; name files with --data"
        )
    return documents


def _expand(path: str) -> list[Path]:
    """List the files one `--data` value names."""
    root = Path(path).expanduser()
    if root.is_dir():
        documents = [file for file in _walk(root) if file.suffix.lower() in TEXT_SUFFIXES]
        if not documents:
            raise DataError(
                f"data folder {path!r} must hold text files; found none with a known suffix "
                f"({', '.join(sorted(TEXT_SUFFIXES))}); name the files, or use a pattern"
            )
        return documents
    if root.is_file():
        return [root]
    if _GLOB_CHARACTERS & set(path):
        matches = map(Path, sorted(glob.glob(str(root), recursive=True)))  # noqa: PTH207 (absolute patterns too)
        documents = [match for match in matches if match.is_file()]
        if documents:
            return documents
        raise DataError(f"data pattern {path!r} must match files; found none; check the pattern")
    raise DataError(f"data path {path!r} must be a file, folder or pattern; found nothing there")


def _walk(root: Path, skipped: frozenset[str] = frozenset()) -> list[Path]:
    """List the files under `root` sorted by relative path, hidden and `skipped` ones left out."""
    found: list[tuple[str, ...]] = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if _is_visible(name) and name not in skipped]
        parents = Path(folder).relative_to(root).parts
        found.extend((*parents, name) for name in files if _is_visible(name))
    return [root.joinpath(*parts) for parts in sorted(found)]


def _is_visible(name: str) -> bool:
    return not name.startswith(".") and name != "__pycache__"


class _Reader:
    """Reads files up to a number of bytes in all."""

    def __init__(self, max_bytes: int | None) -> None:
        self._left = max_bytes
        self.is_cut = False

    def read(self, documents: Iterable[Path]) -> Iterator[tuple[Path, bytes]]:
        """Yield each file and its bytes; a cut file ends between characters."""
        for path in documents:
            raw = _read_bytes(path, self._left)
            if self._left is not None:
                self.is_cut = len(raw) > self._left
                raw = _whole_characters(raw[: self._left]) if self.is_cut else raw
                self._left -= len(raw)
            if raw:
                yield path, raw
            if self.is_cut:
                return


def _read_bytes(path: Path, limit: int | None) -> bytes:
    """Read a file, or one byte more than `limit` where it has as many."""
    try:
        with path.open("rb") as file:
            return file.read(-1 if limit is None else limit + 1)
    except OSError as error:
        raise DataError(
            f"data file {str(path)!r} must be readable; found: {error.strerror}; check its "
            f"permissions"
        ) from error


def _whole_characters(raw: bytes) -> bytes:
    """Drop the start of a UTF-8 character that a cut left at the end."""
    for back in islice(range(1, len(raw) + 1), 3):
        byte = raw[-back]
        if byte & 0xC0 == 0x80:  # a continuation byte: its lead is further back
            continue
        length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return raw[:-back] if length > back else raw
    return raw


def _decode(path: Path, raw: bytes, bad_bytes: BadBytes) -> tuple[str | None, int]:
    """Decode one file: its text (None to leave it out) and the number of bad sequences."""
    num_bad = 0
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        if bad_bytes == "error":
            raise DataError(
                f"data must be UTF-8 text; {str(path)!r} holds other bytes, first at byte "
                f"{error.start}; convert the file, or set data.bad_bytes to 'replace' or 'skip'"
            ) from error
        text = raw.decode("utf-8", errors="replace")
        num_bad = text.count(_REPLACEMENT) - raw.count(_REPLACEMENT.encode())
    found = ""
    if "\0" in text:
        found = f"a zero byte, at {raw.index(0)}"
    elif num_bad > _MOST_REPLACED * len(text):
        found = f"{num_bad:,} of {len(text):,} characters that are no UTF-8"
    if bad_bytes == "skip" and (num_bad or found):
        return None, max(num_bad, 1)
    if found:
        raise DataError(
            f"data must be text; {str(path)!r} holds {found}: it is binary, or text in another "
            "encoding; convert it, name other files, or set data.bad_bytes to 'skip'"
        )
    return text, num_bad
