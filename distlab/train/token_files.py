"""Files of tokens: the kind of each, recognised by its content, and its mapping into memory.

    .npy       one dimension of uint8, uint16 or uint32
    .bin       raw little-endian uint16, or uint32 if `--token-dtype` says so
    others     text: the bytes are the tokens

A .npy file is recognised by its first bytes, whatever its name.

Archives, checkpoints and tables are refused: their bytes are those of a container, and a model
would learn to predict these. Imports no torch.
"""

import os
import stat
from pathlib import Path
from typing import NamedTuple

import numpy as np

TOKEN_DTYPES = {"uint8": np.uint8, "uint16": np.uint16, "uint32": np.uint32}
SAMPLE = 1 << 20  # numbers of a .bin that are examined to recognise its type
FEWEST_PAIRS = 4  # pairs of uint16 numbers from which a uint32 file is recognised
HIGHEST_HALF = 3  # high half of a token id below 4 · 65,536, larger than every vocabulary in use
TAR_MAGIC_AT = 257  # offset of the magic bytes in a tar archive


class Container(NamedTuple):
    """A format that is not tokens.

    Attributes:
        what: name of the format.
        start: first bytes of such a file.
        end: last bytes, if the first ones alone may be those of a text.
        remedy: advice about such a file.
    """

    what: str
    start: bytes
    remedy: str
    end: bytes = b""


_UNPACK = "unpack it first"
_EXPORT = "write its tokens with numpy.save, or its text to a file"
CONTAINERS = (
    Container("a zip archive, such as numpy's .npz or torch's .pt", b"PK\x03\x04", _EXPORT),
    Container("an empty zip archive", b"PK\x05\x06", _EXPORT),
    Container("a gzip archive", b"\x1f\x8b\x08", _UNPACK),
    Container("an xz archive", b"\xfd7zXZ\x00", _UNPACK),
    Container("a Zstandard archive", b"\x28\xb5\x2f\xfd", _UNPACK),
    Container("an LZ4 archive", b"\x04\x22\x4d\x18", _UNPACK),
    Container("a 7z archive", b"7z\xbc\xaf\x27\x1c", _UNPACK),
    Container("a Parquet table", b"PAR1", _EXPORT, end=b"PAR1"),
    Container("an Arrow table", b"ARROW1\x00\x00", _EXPORT),
    Container("an HDF5 file", b"\x89HDF\r\n\x1a\n", _EXPORT),
    Container("an SQLite database", b"SQLite format 3\x00", _EXPORT),
    # torch first pickles its magic number. After the pickles there are the raw values.
    Container(
        "a pickle, of an older torch's .pt", b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19", _EXPORT
    ),
    *(
        Container(
            "a pickle, such as an older torch's .pt", bytes([0x80, protocol]), _EXPORT, end=b"."
        )
        for protocol in range(2, 6)
    ),
    # The digit between the two parts of bzip2's signature is the size of its blocks.
    *(Container("a bzip2 archive", b"BZh%d1AY&SY" % level, _UNPACK) for level in range(1, 10)),
)


def kind_of(path: str | Path) -> str:
    """Return `npy`, `bin` or `text`: how the tokens of a file are stored.

    Raises:
        OSError: the file cannot be read.
        ValueError: a folder, pipe or device, or a container.
    """
    path = Path(path)
    _require_file(path)
    with open(path, "rb") as file:
        # Up to the end of a tar archive's magic, the furthest of all that are looked for.
        head = file.read(TAR_MAGIC_AT + 6)
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - 8))
        tail = file.read(8)
    if head.startswith(np.lib.format.MAGIC_PREFIX):
        return "npy"
    for container in CONTAINERS:
        if head.startswith(container.start) and tail.endswith(container.end):
            raise ValueError(_of_container(path, container.what, container.remedy))
    if head[TAR_MAGIC_AT:] in (b"ustar\x00", b"ustar "):
        raise ValueError(_of_container(path, "a tar archive", _UNPACK))
    # A safetensors file begins with the length of its header, which is JSON.
    header_bytes = int.from_bytes(head[:8], "little")
    if head[8:10] in (b'{"', b"{}") and 2 <= header_bytes <= size - 8:
        raise ValueError(_of_container(path, "a safetensors file", _EXPORT))
    suffix = path.suffix.lower()
    return suffix[1:] if suffix in (".npy", ".bin") else "text"


def open_tokens(path: str | Path, dtype: str | None = None) -> np.ndarray:
    """Map a token file into memory.

    Args:
        path: file of a kind above.
        dtype: type of a `.bin`: `uint16` (default) or `uint32`.

    Raises:
        OSError: the file cannot be read.
        ValueError: not a file of tokens, a size that is not a multiple of the dtype's, a dtype that
            is not allowed, a `.bin` that seems to hold uint32 where no dtype is given, or no
            tokens.
    """
    path = Path(path)
    kind = kind_of(path)
    if kind == "npy":
        if dtype is not None and path.suffix.lower() == ".bin":
            raise ValueError(
                f"{path} is numpy's .npy by its content, which says its own type: leave "
                "--token-dtype out"
            )
        return _open_array(path)
    name = (dtype or "uint16") if kind == "bin" else "uint8"
    if name not in TOKEN_DTYPES:
        raise ValueError(f"token type {name!r} is unknown; allowed: {', '.join(TOKEN_DTYPES)}")
    token_dtype = np.dtype(TOKEN_DTYPES[name])
    size = path.stat().st_size
    width = token_dtype.itemsize
    if size % width:
        raise ValueError(
            f"{path} has {size} bytes, which is not a multiple of {width} ({name}): it is "
            "truncated, or of another type (--token-dtype)"
        )
    if size == 0:
        raise ValueError(f"{path} is empty")
    # Mapped and not read: a file may be larger than the memory.
    tokens = np.memmap(path, dtype=token_dtype.newbyteorder("<"), mode="r")
    if kind == "bin" and dtype is None and _looks_like_uint32(tokens):
        raise ValueError(
            f"{path} seems to hold uint32: read as uint16, every second number is 0 or almost 0. "
            "Give --token-dtype uint32, or --token-dtype uint16 if these are its tokens"
        )
    return tokens


def _require_file(path: Path) -> None:
    """Raise ValueError for a path that cannot be mapped into memory, without opening it.

    Opening a pipe would wait for a writer.
    """
    mode = os.stat(path).st_mode
    if stat.S_ISREG(mode):
        return
    remedy = "write the data to a file, and give that"
    if stat.S_ISDIR(mode):
        what = "a folder"
        remedy = "give a file in it"
    elif stat.S_ISFIFO(mode):
        what = "a pipe (FIFO)"
    elif stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        what = "a device"
    elif stat.S_ISSOCK(mode):
        what = "a socket"
    else:
        what = "not a regular file"
    raise ValueError(f"{path} is {what}, and tokens are read from a file, more than once: {remedy}")


def _of_container(path: Path, what: str, remedy: str) -> str:
    """Return the message about a file that is a container."""
    return f"{path} is {what} by its content, not a text and not tokens: {remedy}"


def _looks_like_uint32(tokens: np.ndarray) -> bool:
    """Return True if uint16 numbers are halves of uint32 tokens, which have few high halves."""
    pairs = min(len(tokens), SAMPLE) // 2
    if len(tokens) % 2 or pairs < FEWEST_PAIRS:
        return False
    low = tokens[: 2 * pairs : 2]
    high = tokens[1 : 2 * pairs : 2]
    # In a file of uint16 tokens, those at even and at odd places are alike. With a small
    # vocabulary, such as 0 to 3, both are small.
    only_zeros = not high.any() and bool(low.any())
    # A low half above 255 shows that the vocabulary is large, so that small high halves are no
    # accident.
    return only_zeros or (int(high.max()) <= HIGHEST_HALF and int(low.max()) > 255)


def _open_array(path: Path) -> np.ndarray:
    """Map a `.npy` file.

    numpy's own errors name no file, and for some files they advise to unpickle them.
    """
    with open(path, "rb") as file:  # an OSError names the file
        start = file.read(len(np.lib.format.MAGIC_PREFIX))
    remedy = f"Write it with numpy.save from one dimension of {', '.join(TOKEN_DTYPES)}"
    if start != np.lib.format.MAGIC_PREFIX:
        reason = "its first bytes are not those of the format"
        remedy += ", or give it another suffix to train on its bytes"
    else:
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
            if tokens.ndim == 1 and tokens.dtype.name in TOKEN_DTYPES:
                return tokens
            reason = f"it holds {tokens.dtype.name} of shape {tokens.shape}"
        except (ValueError, EOFError) as error:
            text = str(error)
            if "object" in text.lower() or "pickle" in text.lower():
                reason = "it holds Python objects"
            else:
                first_line = text.splitlines()[0][:100]
                reason = f"it is truncated or damaged ({first_line})"
    raise ValueError(f"{path} is not an array of tokens in numpy's .npy format: {reason}. {remedy}")
