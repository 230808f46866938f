"""The wrapper as one file that any Python 3.7 or later runs: `python3 -S -I atoll.pyz …`."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

FILE = "atoll.pyz"
PARTS = {
    "__main__.py": "wrapper.py",
    **{
        name: name
        for name in ("process.py", "records.py", "unpack.py", "machine_use.py", "metric_sinks.py")
    },
}
DATE = (2020, 1, 1, 0, 0, 0)  # the same files make the same bytes


def wrapper_file() -> bytes:
    """`agent/wrapper.py` and the files that it needs as an archive that Python runs."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_STORED) as archive:
        for name, source in PARTS.items():
            text = Path(__file__).with_name(source).read_bytes()
            archive.writestr(zipfile.ZipInfo(name, DATE), text)
    return data.getvalue()
