"""Read by each Python that finds this folder in PYTHONPATH: torch says that there is no AMX. See `runs.vllm_peer`."""

import torch

torch.cpu._is_amx_tile_supported = lambda: False
