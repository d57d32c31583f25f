"""Fakes and small models, shipped so that users can test their pipelines the way batchinfer tests itself.

Torch-free here; `testing.tiny` (small checkpoints), `testing.oracle` (transformers) and `testing.stores` (object
stores that fail) are imported by name.
"""

from batchinfer.runner.fake import FakeRunner, expected_output

__all__ = ["FakeRunner", "expected_output"]
