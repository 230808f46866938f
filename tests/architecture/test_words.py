"""The code speaks the language of its field: few words of its own, and one word for one thing."""

from __future__ import annotations

import ast
import collections
import inspect
import io
import keyword
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import atoll

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
MAX_VOICE = 4.5  # per 1,000 identifiers; NotFound and FileNotFoundError are 2 of them

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
    "Tending": "Followup",
    "honour": "unsupported_fields",
    "not_honoured": "unsupported_fields",
    "rejoined": "clear_condition",
    "out_of_reach": "EXECUTOR_UNREACHABLE",
    "set_aside": "quarantine",
    "give_result": "set_result",
    "hand_in": "drain, set_result",
    "RecordPlace": "RecordStore",
    "RankPlace": "RankLayout",
    "CodePlace": "code_dir",
    "Warden": "StopPolicy",
    "Pulse": "heartbeat",
    "Door": "ConnectionLimiter",
    "Reused": "TTLCache",
    "Teller": "MetricSink",
    "SharedData": "Ledger",
    "RunClaim": "RunLock",
    "HeldMean": "EncodedMean",
    "Departure": "leave",
    "ReplicaFace": "DiLoCo",
    "PodMemory": "DeletedPods",
    "LetGo": "DropFinalizer",
    "GiveUp": "FailLostPods",
    "collect_garbage": "gc",
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


# What users read: the phrase on the left was replaced by the one on the right.
PHRASES = {
    r"\btold\b|\btellers?\b": "reported, asked",
    r"\bretired\b": "removed",
    r"\bchores?\b|\btend(s|ing)\b": "followup, perform",
    r"\brejoin(s|ed)?\b": "joins again",
    r"\bnarrat\w+|\bin words\b": "describe, message",
    r"\bbur(y|ied)\b|\bpurge[ds]?\b": "delete",
    r"\bmuster\w*|\bwardens?\b|\bpulses?\b": "start barrier, stop policy, heartbeat",
    r"\bquiet(ly)?\b|\bsilence\b": "idle",
    r"\bfigures\b|\b(a|each|this) figure\b": "metric, number, measurement",
    r"\bdoors?\b|\bintroduce[ds]?\b": "connection limit, authenticate",
    r"\bseldom\b|\bhappenings?\b": "what it is",
    r"\bsettlers?\b|\bsift(ed|s)?\b|\bscribes?\b": "manifest, upload, ledger",
    r"\bdepart(ure|s|ed)\b": "leave",
    r"\bhand(s|ed|ing)? in\b": "upload, drain",
    r"\bgo(es)? on\b|\bwent on\b": "continue, keep running",
    r"\b(for|no|its|more) room\b": "capacity",
    r"\b(not|never) seen\b": "observed",
    r"--stall-s\b|--ttl-seconds\b": "--stall-timeout, --ttl",
    r"\bcome, go and\b|\bminus where\b": "what happens",
    r"\bmovements?\b|\bmoved identically\b": "pseudo-gradient",
    r"\brosters?\b|\bballots?\b": "manifest",
    r"\bwish(es)?\b": "desired state",
    r"\bkeepers?\b": "watchdog, supervisor",
    r"\bstillness\b": "idle",
    r"\b(not )?honou?r(ed|s)?\b": "support",
    r"\ba look\b|\blooked at\b": "observation, poll",
    r"\bset aside\b": "quarantined",
    r"\bstrangers?\b": "unauthenticated",
    r"\bagreed\b": "committed",
    r"\bowe[ds]?\b": "residual",
    r"\blast words\b": "last lines",
    r"\bin vain\b": "without effect",
    r"\bcurves?\b": "chart, plot",
    r"\bhindered\b|\bout of reach\b": "failing, unreachable",
    r"\bcargo\b|\bparcels?\b": "upload",
    r"\bformerly\b|\bused to be\b|\bin older texts\b": "what is",
    r"pip install '?\"?atoll\b": "pip install '.[…]' in a clone: the name is not ours on any index",
}
# The rows of the fault table have names that runs were kept under; a stranger's code is English.
FAULTS = re.compile(r"<!--faults-->.*<!--/faults-->|a stranger's code", re.S)
CODE = re.compile(r"^```.*?^```|`[^`\n]*`|<!--.*?-->", re.M | re.S)
SCRIPT_TEXT = re.compile(r'"(?:[^"\\\n]|\\.)*"|`[^`]*`')


def texts() -> Iterator[tuple[str, str]]:
    """Pages without code, and what the command, the page, errors, events, logs, `help()`, examples
    and `kubectl explain` say."""
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        yield page.name, CODE.sub("", FAULTS.sub("", page.read_text()))
    # In a process of its own: click keeps the help option that a command had when first called.
    made = subprocess.run([sys.executable, "-m", "tools.manual"], capture_output=True, text=True)
    assert "## atoll run" in made.stdout, made.stderr
    yield "atoll --help", made.stdout
    for script in (ROOT / "src/atoll/server/ui/static").glob("*.js"):
        yield script.name, "\n".join(SCRIPT_TEXT.findall(script.read_text()))
    shipped = (ROOT / "deploy").rglob("*.yaml"), (ROOT / "examples").glob("*.py")
    pages = (ROOT / "src/atoll").rglob("*.html")
    for path in (*pages, *(each for kind in shipped for each in kind)):
        yield path.name, path.read_text()
    for name in atoll.__all__:
        public = getattr(atoll, name)
        yield f"help(atoll.{name})", "\n".join(docstrings(public))
    for path in SOURCES:
        yield str(path.relative_to(ROOT)), "\n".join(messages(path))


def docstrings(public: object) -> Iterator[str]:
    """What `help` prints of a name and of its public members."""
    yield inspect.getdoc(public) or ""
    members = vars(public).items() if inspect.isclass(public) else ()
    for name, member in members:
        if not name.startswith("_") and (callable(member) or isinstance(member, property)):
            yield inspect.getdoc(member) or ""


def messages(path: Path) -> Iterator[str]:
    """String literals with a space in them, which are not docstrings."""
    tree = ast.parse(path.read_text())
    statements = [n.value for n in ast.walk(tree) if isinstance(n, ast.Expr)]
    docstrings = {id(value) for value in statements}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if " " in node.value and id(node) not in docstrings:
                yield node.value


def test_what_users_read_has_the_words_of_the_field() -> None:
    found = {
        f"{name}: {match[0]!r} (say {new})"
        for name, text in texts()
        for old, new in PHRASES.items()
        for match in re.finditer(old, text, re.I)
    }
    assert sorted(found) == []
