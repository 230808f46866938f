"""Files of variables: `K=V` lines as in `docker run --env-file`, with quotes and comments."""

from __future__ import annotations

from pathlib import Path

from atoll.core.errors import ValidationError

FLAG = "--env-file"


def read_env_file(path: Path) -> dict[str, str]:
    """Raises ValidationError that names the file and the line, and never shows a value."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ValidationError(FLAG, str(path), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValidationError(FLAG, str(path), "expected a text file in UTF-8") from error
    env: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip().removeprefix("export ").lstrip()
        if not text or text.startswith("#"):
            continue
        name, has_value, value = text.partition("=")
        if not has_value or not name.strip().isidentifier():
            raise ValidationError(FLAG, str(path), f"line {number}: expected K=V")
        env[name.strip()] = _value(value.strip(), path, number)
    return env


def _value(text: str, path: Path, number: int) -> str:
    quote = text[:1]
    if quote not in ("'", '"'):
        return text.partition(" #")[0].rstrip()
    inside, end, rest = text[1:].partition(quote)
    if not end or (rest.strip() and not rest.lstrip().startswith("#")):
        expected = f"line {number}: expected a closing {quote} at the end of the value"
        raise ValidationError(FLAG, str(path), expected)
    return inside
