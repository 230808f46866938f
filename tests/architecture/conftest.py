"""The shell of the e2e tests, for the snippets of the documents."""

from tests.e2e.conftest import atoll, plane

__all__ = ["atoll", "plane"]
