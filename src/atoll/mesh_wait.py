"""`python -m atoll.mesh_wait [--timeout N]`: the gate for a shell script, before its training.

Always exits 0: the gate fails open. Imported, this module puts the function of the same name in
its own place, so that `atoll.mesh_wait` is the function whatever was imported first.
"""

from __future__ import annotations

import sys

from atoll.mesh.gate import mesh_wait

if __name__ == "__main__":
    import click

    # As text: what is no number is the default, as an empty variable must not stop a training.
    timeout = click.Option(["--timeout"], type=str, default="60", help="Seconds; 60.")
    click.Command(None, params=[timeout], callback=mesh_wait, help="Wait for this host's network.")(
        prog_name="python -m atoll.mesh_wait"
    )
else:
    # The import system binds what it finds here, not what it executed, in the parent package.
    sys.modules[__name__] = mesh_wait  # type: ignore[assignment]
