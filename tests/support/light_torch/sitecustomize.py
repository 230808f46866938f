"""Torch without its compiler until something compiles, for every process that tests start.

The first step of an optimiser loads `torch._dynamo` only to tell it where not to look, which takes
a second of the processor in each rank. Whatever asks for more than that loads all of it.

Every Python imports this file, so it imports nothing itself.
"""

import sys

NAME = "torch._dynamo"
(_PATHS,) = (finder for finder in sys.meta_path if getattr(finder, "__name__", "") == "PathFinder")


class Light(type(sys)):
    """Has what an optimiser calls, without any effect."""

    @staticmethod
    def graph_break():
        pass

    @staticmethod
    def disable(fn, *_, **__):
        return fn

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        self.load()
        return getattr(self, name)

    def load(self):
        self.__class__ = type(sys)
        _PATHS.find_spec(NAME, sys.modules["torch"].__path__).loader.exec_module(self)


class Finder:
    @staticmethod
    def find_spec(name, path=None, _=None):
        if not name.startswith(NAME):
            return None
        if name == NAME:
            spec = _PATHS.find_spec(name, path)
            spec.loader = Finder
            return spec
        if isinstance(sys.modules[NAME], Light):
            sys.modules[NAME].load()
        return None

    @staticmethod
    def create_module(spec):
        return Light(spec.name)

    @staticmethod
    def exec_module(_):
        """Not yet."""


sys.meta_path.insert(0, Finder)
