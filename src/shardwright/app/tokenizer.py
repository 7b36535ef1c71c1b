"""Text to token ids and back: bytes, or a Hugging Face `tokenizer.json`.

`load_tokenizer` is the way in; `shardwright.app.data` encodes the corpus with the result and
`shardwright.app.train` decodes samples. The `tokenizers` package is imported only when asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from shardwright.core.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

BYTES = "bytes"
"""The name that asks for the byte tokenizer."""


class Tokenizer(Protocol):
    """What the application needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of ids; every id is below it."""

    def encode(self, text: str) -> NDArray[np.unsignedinteger]:
        """Turn text into ids, 1-D, in the smallest type that `token_dtype` allows."""

    def decode(self, ids: Sequence[int]) -> str:
        """Turn ids into text; what is no valid text becomes U+FFFD."""


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Choose the array type of a vocabulary's ids: uint16 where they fit, else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


class ByteTokenizer:
    """One token per UTF-8 byte; 256 ids, nothing to download, every text representable."""

    vocab_size = 256

    def encode(self, text: str) -> NDArray[np.unsignedinteger]:
        """Turn text into its UTF-8 bytes, uint16."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: Sequence[int]) -> str:
        """Turn bytes into text; broken sequences become U+FFFD."""
        return bytes(ids).decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A `tokenizer.json` read with the `tokenizers` package; adds no special tokens."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Args:
            path: A `tokenizer.json`.

        Raises:
            SpecError: If the package or the file is missing, or the file can't be read.
        """
        try:
            import tokenizers
        except ImportError as error:
            raise SpecError(
                f"tokenizer {str(path)!r} needs the 'tokenizers' package, which is not "
                f"installed; run: pip install 'shardwright[hf]'"
            ) from error
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises bare Exception for a bad file
            raise SpecError(
                f"tokenizer must be a Hugging Face tokenizer.json; {str(path)!r} could not be "
                f"read ({error}); give another file, or '{BYTES}'"
            ) from error
        # Ids may leave gaps, so the largest id decides, not the number of tokens.
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> NDArray[np.unsignedinteger]:
        """Turn text into ids, without special tokens."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return np.asarray(ids, dtype=token_dtype(self.vocab_size))

    def decode(self, ids: Sequence[int]) -> str:
        """Turn ids into text."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def load_tokenizer(name: str) -> Tokenizer:
    """Build the tokenizer a configuration names.

    Args:
        name: `"bytes"`, a `tokenizer.json`, or a folder that holds one.

    Returns:
        The tokenizer.

    Raises:
        SpecError: If there is no such file, or it can't be used.
    """
    if name == BYTES:
        return ByteTokenizer()
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise SpecError(
            f"tokenizer must be '{BYTES}' or the path of a tokenizer.json; found {name!r}, "
            f"which is no file; check the path"
        )
    return HuggingFaceTokenizer(path)
