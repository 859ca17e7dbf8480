"""What a report's reader sees twice."""

import re


def doubled_headings(page: str) -> list[str]:
    """Headings of a report that stand in it a second time: as another heading, or in a picture."""
    headings = [heading.removeprefix("dpx: ").casefold() for heading in re.findall(r"<h[12]>(.*?)</h[12]>", page)]
    drawn = [words.casefold() for words in re.findall(r"<text[^>]*>(.*?)</text>", page)]
    return [heading for heading in headings if headings.count(heading) + drawn.count(heading) > 1]
