"""Make text safe that comes from elsewhere: from records, runs, markers and models.

`for_terminal` is for text that is printed, `for_markdown` for text that is written into a Markdown
file. Pages in HTML need neither, because their templates escape everything.
"""

import re
import unicodedata

# Control characters, formatting ones (which can reverse a line), halves of a surrogate pair, line
# separators.
UNSAFE_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")
KEPT = "\n\t"


def for_terminal(text: str) -> str:
    """Return the text with escapes (`\\x1b`) for control and other invisible characters."""
    # The usual case, without a look at each character.
    if text.isascii() and text.isprintable():
        return text
    return "".join(_visible(character) for character in text)


def for_markdown(text: str) -> str:
    """Return the text on one line, with everything that Markdown or HTML would obey escaped."""
    line = for_terminal(" ".join(text.split()))  # a line break would end a row of a table
    # A closing bracket before one of ( [ : would end the text of a link.
    return re.sub(r"[\\|*<`]|\](?=[(\[:])", r"\\\g<0>", line)


def _visible(character: str) -> str:
    if character in KEPT or unicodedata.category(character) not in UNSAFE_CATEGORIES:
        return character
    return character.encode("unicode_escape").decode("ascii")
