"""What a model costs on a device, by arithmetic alone: bytes, operations, and the time that they take at best.

`model` counts a model's weights and its KV cache, `devices` knows rates, `roofline` puts them together for a job;
`kv_pool` says how small a pool of KV blocks can't be.
Nothing is measured or loaded here.
"""

from batchinfer.cost.devices import Device, find_device, parse_device
from batchinfer.cost.kv_pool import check_pool
from batchinfer.cost.model import ModelShape
from batchinfer.cost.roofline import JobTokens, Prediction, predict

__all__ = ["Device", "JobTokens", "ModelShape", "Prediction", "check_pool", "find_device", "parse_device", "predict"]
