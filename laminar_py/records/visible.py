"""Text of models, data and programs, made harmless for a terminal or a page. Used wherever such text is shown."""


def visible(text: str, *, keep: str = "") -> str:
    r"""Text with characters that do not print as escapes, e.g. `\x1b` or `\u202e`; those in `keep` stay.

    Such are control characters, overrides of direction, lone surrogates, and every space but the plain one.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in keep else repr(one)[1:-1] for one in text)
