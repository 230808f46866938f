"""A rank's token speaks for its training, and only with the key that signed it."""

from __future__ import annotations

from pathlib import Path

from atoll.backends.metrics_token import key_at, read_token, token_for


def test_a_token_speaks_for_the_training_it_was_made_for(tmp_path: Path) -> None:
    key = key_at(tmp_path)
    assert key == key_at(tmp_path)
    assert (tmp_path / "report-key").stat().st_mode & 0o777 == 0o600
    token = token_for(key, "team-a", "abc123")
    assert read_token(key, token) == ("team-a", "abc123")
    assert read_token(b"other" * 8, token) is None
    assert read_token(key, token.replace("team-a", "team-b")) is None
    assert read_token(key, token.replace("abc123", "abc124")) is None
    assert read_token(key, token[:-1]) is None
    assert read_token(key, "") is None
