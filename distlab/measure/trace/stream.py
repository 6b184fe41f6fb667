"""Read a trace file event by event, so that a file of several GB needs the memory of one event.

A trace of torch.profiler is one JSON object. Its key `traceEvents` holds a list with almost all of
the file's bytes. `entries` decodes this list one event at a time from a buffer of a few MB. It
knows nothing of what the events mean: `reader` does.
"""

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from distlab.files import AnyPath

Entry = dict[str, Any]  # one event of a trace file
Progress = Callable[[str], None]  # receives a sentence about how far the reader is

CHUNK_BYTES = 1 << 22  # bytes that are read at a time
# Characters of the largest value that is not an event, such as a list of devices. A file that
# needs more is not a trace, and must not fill the memory.
MAX_VALUE = 1 << 26
_GZIP_MAGIC = b"\x1f\x8b"  # first two bytes of every gzip file (RFC 1952)
_SPACE = re.compile(r"[ \t\r\n]*")
_BETWEEN = re.compile(r"[ \t\r\n,]*")  # what separates two events


class _Buffer:
    """The text of a file that has been read and not yet decoded.

    Attributes:
        text: characters that were read.
        at: index in `text` of the next character to decode.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.text = ""
        self.at = 0
        self._file = file
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._parse = json.JSONDecoder().raw_decode

    def more(self) -> None:
        """Read another chunk. Raises EOFError at the end of the file."""
        if len(self.text) - self.at > MAX_VALUE:
            raise ValueError(f"a value of more than {MAX_VALUE >> 20} MiB")
        data = self._file.read(CHUNK_BYTES)
        if not data:
            raise EOFError("it ends in the middle of a value")
        self.text = self.text[self.at :] + self._decode(data)
        self.at = 0

    def peek(self, skipped: re.Pattern[str] = _SPACE) -> str:
        """Return the next character after those that `skipped` matches, without consuming it."""
        while True:
            self.at = skipped.match(self.text, self.at).end()
            if self.at < len(self.text):
                return self.text[self.at]
            self.more()

    def expect(self, character: str) -> None:
        """Consume one character. Raises ValueError if another one comes."""
        found = self.peek()
        if found != character:
            raise ValueError(f"{found!r} where {character!r} is expected")
        self.at += 1

    def value(self) -> Any:
        """Decode and consume one JSON value."""
        self.peek()
        while True:
            try:
                value, end = self._parse(self.text, self.at)
            except ValueError as error:
                # The value may only be cut off at the end of the chunk.
                try:
                    self.more()
                except EOFError:
                    raise error from None
                continue
            # A number may go on in the next chunk. Objects, lists and strings have an end.
            if end == len(self.text) and isinstance(value, int | float):
                try:
                    self.more()
                    continue
                except EOFError:
                    pass
            self.at = end
            return value


def entries(
    path: AnyPath, progress: Progress | None = None, about: Entry | None = None
) -> Iterator[Entry]:
    """Yield the events of a torch.profiler trace (``.json`` or ``.json.gz``), in the file's order.

    Args:
        path: path of the trace.
        progress: function that receives a sentence after every few MB.
        about: dictionary that receives the other keys of the file, such as ``distributedInfo``, and
            True for ``traceEvents``. It is complete after the last event.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is truncated. The message names the path.
    """
    header: Entry = {} if about is None else about
    try:
        yield from _entries(Path(path), progress, header)
    except (ValueError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(
            f"{path} is truncated or is not a trace ({error}): profile again"
        ) from None


def _entries(path: Path, progress: Progress | None, header: Entry) -> Iterator[Entry]:
    """Yield the events, and fill in the header. Errors do not name the path."""
    size = path.stat().st_size
    with open(path, "rb") as raw:
        is_gzip = raw.read(2) == _GZIP_MAGIC
        raw.seek(0)
        buffer = _Buffer(gzip.GzipFile(fileobj=raw) if is_gzip else raw)
        # A JSON file of another form, such as a list, has no traceEvents. The caller says so.
        if buffer.peek() != "{":
            buffer.value()
            return
        buffer.expect("{")
        while buffer.peek() != "}":
            key = buffer.value()
            buffer.expect(":")
            if key == "traceEvents" and buffer.peek() == "[":
                header[key] = True
                yield from _list(buffer, lambda: _say(progress, path, raw.tell(), size))
            else:
                header[key] = buffer.value()
            if buffer.peek() == ",":
                buffer.at += 1


def _list(buffer: _Buffer, each_chunk: Callable[[], None]) -> Iterator[Entry]:
    """Yield the values of a list that begins at the buffer's next character."""
    buffer.expect("[")
    text = ""
    while buffer.peek(_BETWEEN) != "]":
        yield buffer.value()
        if buffer.text is not text:  # another chunk was read
            text = buffer.text
            each_chunk()
    buffer.at += 1


def _say(progress: Progress | None, path: Path, read: int, size: int) -> None:
    if progress is not None and size:
        progress(f"reading {path.name}: {100 * read // size} %")
