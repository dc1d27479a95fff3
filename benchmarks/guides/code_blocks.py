"""Code blocks of a guide, which the measurements run as a reader would."""

import re


def code_block(page: str, head: str, guide: str) -> str:
    """Return the first code block of a page whose first line starts with a head.

    Args:
        page: text of the page.
        head: language, or language and title, such as `python title="make_pairs.py"`.
        guide: file name of the page, for the error.

    Raises:
        ValueError: the page has no such block.
    """
    found = re.search(rf"```{re.escape(head)}[^\n]*\n(.*?)```", page, re.DOTALL)
    if found is None:
        raise ValueError(f"expected a block of {head} in {guide}")
    return found[1]
