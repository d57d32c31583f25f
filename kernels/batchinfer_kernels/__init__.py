"""Kernels: functions of tensors and numbers that know nothing of sequences, layers or configs.

`table` names the operations and picks an implementation once, `reference` is their readable specification in plain
torch, `cpu` the fast plain-torch versions, `native` those in C, compiled on first use, `determinism` what a process
must do before torch is loaded, `probe` what is measured about a machine's products. Nothing of `batchinfer` is
imported here.
"""
