"""The engine: requests in, outcomes out. `engine` (the loop), `build` (from a config), `llm` (the facade)."""

from batchinfer.engine.build import load_engine
from batchinfer.engine.engine import Engine, EngineStats

__all__ = ["Engine", "EngineStats", "load_engine"]
