"""Text of others made safe: records, runs, markers and models may come from anywhere, and so may what they say.

`for_terminal` is for whatever is printed, `for_markdown` for whatever is written into a Markdown
file. Pages in HTML need neither, because their templates escape everything.
"""

import re
import unicodedata

# Control characters, formatting ones (which can reverse a line), halves of a surrogate pair, line
# separators.
UNSAFE_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")
KEPT = "\n\t"


def for_terminal(text: str) -> str:
    """Return the text with everything that a terminal would obey, or cannot show, written as an escape (`\\x1b`)."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_visible(character) for character in text)


def for_markdown(text: str) -> str:
    """Return the text on one line, with everything that Markdown or HTML would obey escaped."""
    line = for_terminal(" ".join(text.split()))  # a line break would end a row of a table
    # a bracket before these would end a link's text
    return re.sub(r"[\\|*<`]|\](?=[(\[:])", r"\\\g<0>", line)


def _visible(character: str) -> str:
    if character in KEPT or unicodedata.category(character) not in UNSAFE_CATEGORIES:
        return character
    return character.encode("unicode_escape").decode("ascii")
