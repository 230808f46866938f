"""Names of the release before: `python -m atoll.worker.entrypoint` and its neighbours.

Gangs that were started by it restart their ranks with these names, and images run them.
"""

from pathlib import Path

_ATOLL = Path(__file__).parents[1]
__path__ = [str(_ATOLL / part) for part in ("rank", "mesh", "bench", "local")]
