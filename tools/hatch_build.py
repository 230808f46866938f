"""A hook of hatch: the wheel carries `llms.txt` and `SKILL.md`, made from the pages."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class AgentTexts(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        path = Path(self.root, "tools/agents.py")
        spec = importlib.util.spec_from_file_location("agents", path)
        assert spec is not None
        assert spec.loader is not None
        agents = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(agents)
        self._made = tempfile.TemporaryDirectory()
        for name, text in (("llms.txt", agents.llms()), ("SKILL.md", agents.skill())):
            made = Path(self._made.name, name)
            made.write_text(text)
            build_data["force_include"][str(made)] = f"atoll/{name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self._made.cleanup()
