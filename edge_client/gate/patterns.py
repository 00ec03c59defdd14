"""Finds digits, dates and amounts in text by regular expressions.

They miss numbers, dates and amounts written in words other than the English ones below ("the first of May",
"fünf Euro"), months of other languages, and relative dates ("tomorrow"). A date whose first part is in an
earlier block ("12" of "12 March") is not found there; the rule `digits` finds it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from outrider.edge_client.gate.words import Span

_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?"
    r"|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)\b\.?"
)
_DAY = r"\d{1,2}(?:st|nd|rd|th)?"
_DATE = (
    r"\b\d{4}-\d{1,2}(?:-\d{1,2})?\b"  # 2026-11-21
    r"|\b\d{1,2}([./-])\d{1,2}\1\d{2,4}\b"  # 21.11.2026, 11/21/26
    rf"|\b{_DAY}(?: of)? {_MONTH}(?:,? \d{{4}})?"
    rf"|\b{_MONTH} {_DAY}\b(?:,? \d{{4}})?"
    rf"|\b{_MONTH},? \d{{4}}\b"
    r"|\b(?:1[5-9]|20)\d\d\b"  # a year by itself
    r"|\b[0-2]?\d:[0-5]\d(?::[0-5]\d)?\b"
    r"|\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b"
)
_NUMBER = (
    r"(?:\d[\d.,]*"
    r"|\b(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|fifteen|twenty|thirty|forty"
    r"|fifty|sixty|seventy|eighty|ninety|hundred|thousand|million|billion|trillion|dozen|half)\b)"
)
_UNIT = (
    r"(?:%|‰|°[CF]?|(?:per ?cent|percentage points?|basis points?|bps"
    r"|USD|EUR|GBP|JPY|CHF|CNY|INR|dollars?|euros?|pounds?|yen|francs?|yuan|rupees?|cents?"
    r"|[kKMGTP]i?[Bb](?:ps|/s)?|bits?|bytes?|[kmcµun]?m|[km]m²|km/h|mph|miles?|feet|foot|ft|inch(?:es)?|yards?"
    r"|met(?:er|re)s?|kilomet(?:er|re)s?|[kmµ]?g|grams?|kilograms?|kilos?|tons?|tonnes?|lbs?|oz|ounces?"
    r"|[mc]?l|lit(?:er|re)s?|gallons?|[nmµu]?s|secs?|seconds?|mins?|minutes?|h|hrs?|hours?|days?|weeks?"
    r"|months?|years?|[kMGT]?Hz|[kMG]?W|[kMG]?Wh|[km]?V|mA|A|K|[kM]?[JN]|k?cal|[kM]?Pa|bar|mol)\b)"
)
_AMOUNT = (
    r"[$€£¥₹₽₩]\s?\d[\d.,]*"
    r"|\d[\d.,]*\s?[$€£¥₹₽₩]"
    rf"|{_NUMBER}[ -]?(?:(?:hundred|thousand|million|billion|trillion|k|m|bn) )?{_UNIT}"
)


def _finder(pattern: str) -> Callable[[str, int], Iterator[Span]]:
    compiled = re.compile(pattern)
    return lambda text, start: (match.span() for match in compiled.finditer(text))


find_digits = _finder(r"\d+")  # of any script
find_dates = _finder(_DATE)
find_amounts = _finder(_AMOUNT)  # money, measures with a unit, percentages
