"""The code speaks the language of its field: few words of its own, and one word for one thing."""

from __future__ import annotations

import collections
import io
import keyword
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "atoll").rglob("*.py"))

# Words of a private voice. In 1,000 identifiers kopf has 2.3 of them, httpx 3.2, torchft 0.1.
VOICE = set(
    "told tell tells teller kept keeper keepers look looks looked wish wishes beside gone shown "
    "seen heard hear said says words word place places whole rest asked held found given made "
    "life lives born bury hindered hindrance honour honoured stranger strangers muster still "
    "stillness quiet warden seldom whose cargo parcel settler ballot roster rosters scribe aside "
    "movement movements owed owes lacking sift sifted blame blamed alike figure figures unheard "
    "hurry hurried happening unread painted apart".split()
)
MAX_VOICE = 5.0  # per 1,000 identifiers; kopf has 2.3, httpx 3.2, torchft 0.1

# What the control plane once called by another name: the word on the right is the only one.
REPLACED = {
    "Wish": "DesiredState",
    "Seen": "Observation",
    "SeenRank": "ObservedRank",
    "Chore": "Followup",
    "redo": "discarded_attempts",
    "retired": "removed_ranks",
    "RankEnd": "ExitReason",
    "narrate": "events_between",
    "exit_in_words": "describe_exit",
    "hindered": "BACKEND_FAILING",
    "counted_from": "started_monotonic",
    "PlacedLine": "OffsetLine",
    "NewestFigure": "LatestMetric",
    "SeriesColumns": "MetricSeries",
    "Muster": "StartBarrier",
    "Whose": "StoreAccess",
    "Seldom": "RateLimitFilter",
    "Happening": "TimelineEntry",
    "Settler": "decide_manifest",
    "Ballot": "decide_manifest",
    "Roster": "Manifest",
    "Cargo": "Upload",
    "Scribe": "Ledger",
    "PodKeeper": "GangWriter",
    "MOST_": "MAX_",
    "LEAST_": "MIN_",
    "LONGEST_": "MAX_",
}


def identifiers(path: Path) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.NAME and not keyword.iskeyword(token.string):
            yield token.string


def words_of(name: str) -> list[str]:
    return [part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


def test_the_private_voice_is_below_its_bound() -> None:
    count, by_package = 0, collections.Counter[str]()
    for path in SOURCES:
        for name in identifiers(path):
            count += 1
            if not VOICE.isdisjoint(words_of(name)):
                by_package[path.relative_to(ROOT / "src/atoll").parts[0]] += 1
    voice = 1000 * by_package.total() / count
    assert voice < MAX_VOICE, f"{voice:.1f} per 1,000 identifiers: {by_package.most_common()}"


def test_a_word_that_was_replaced_does_not_come_back() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name} (say {new})"
        for path in SOURCES
        for name in set(identifiers(path))
        for old, new in REPLACED.items()
        if name == old or (old.endswith("_") and name.lstrip("_").startswith(old))
    }
    assert sorted(found) == []
