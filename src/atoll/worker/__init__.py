"""Names of the release before: `python -m atoll.worker.entrypoint` and its neighbours.

Gangs that were started by it restart their ranks with these names, images run them, functions that
were shipped with it refer to them, and its ranks may import them after the files were replaced.
"""

from pathlib import Path

_ATOLL = Path(__file__).parents[1]
__path__ = [str(_ATOLL / part) for part in ("worker", "rank", "mesh", "bench", "local")]
