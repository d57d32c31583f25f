"""Builds an engine from an EngineConfig: opens the model, its tokenizer and a runner; resolves what is "auto".

Responsible for: which runner, limits that follow from the model, refusing by name what is not there yet. Not for:
KV memory and tensors (runner), the loop (`engine`).
"""

from __future__ import annotations

from functools import partial

from batchinfer.config import EngineConfig
from batchinfer.engine.engine import Engine
from batchinfer.errors import ConfigError
from batchinfer.modelfiles import ModelFiles, open_model
from batchinfer.runner.fake import FakeRunner
from batchinfer.text import load_tokenizer

FAKE_MAX_NUM_SEQS = 256
FAKE_MAX_NUM_BATCHED_TOKENS = 8192


def load_engine(config: EngineConfig, *, late_tokenizer: bool = False) -> Engine:
    """An engine ready for requests. Raises ConfigError or ModelError where the config can't be met.

    late_tokenizer   it is built when a text is first asked for, which is after the first tokens; what is wrong with it
                     is found out then: for tokenizers that another process has used already
    """
    if config.tensor_parallel_size != 1:
        raise ConfigError(
            f"engine.tensor_parallel_size: {config.tensor_parallel_size} is planned and not there yet; use 1 "
            "(cluster.workers runs more engines)"
        )
    files = open_model(config.model, revision=config.revision, tokenizer=config.tokenizer)
    max_model_len = resolve_max_model_len(config, files)
    if files.kind == "fake":
        config.check_kernels("fake")
        return _fake_engine(config, files, max_model_len)
    return _local_engine(config, files, max_model_len, late_tokenizer=late_tokenizer)


def resolve_max_model_len(config: EngineConfig, files: ModelFiles) -> int:
    limit = files.max_model_len
    wanted = config.max_model_len
    if wanted is None:
        return limit
    if wanted > limit:
        raise ConfigError(f"engine.max_model_len is {wanted}, but the model has {limit} positions; use at most that")
    return wanted


def _number(value: int | str, auto: int) -> int:
    return value if isinstance(value, int) else auto


def _fake_engine(config: EngineConfig, files: ModelFiles, max_model_len: int) -> Engine:
    return Engine(
        FakeRunner.from_config(files.config, block_size=config.block_size),
        load_tokenizer(files.tokenizer),
        max_model_len=max_model_len,
        vocab_size=files.config["vocab_size"],
        max_num_seqs=_number(config.max_num_seqs, FAKE_MAX_NUM_SEQS),
        max_num_batched_tokens=_number(config.max_num_batched_tokens, FAKE_MAX_NUM_BATCHED_TOKENS),
        enable_prefix_caching=config.enable_prefix_caching,
        async_scheduling=config.async_scheduling,
        model=files,
        facts={"device": ("fake", "model"), "max_model_len": (max_model_len, "engine.max_model_len or model")},
    )


def _local_engine(config: EngineConfig, files: ModelFiles, max_model_len: int, *, late_tokenizer: bool) -> Engine:
    # Both need torch, which is only loaded for a model that needs it; and before it is, MKL must be told.
    from batchinfer_kernels.determinism import prepare

    prepare()
    from batchinfer.runner.load import load_runner

    runner = load_runner(files, config, max_model_len=max_model_len)
    return Engine(
        runner,
        partial(load_tokenizer, files.tokenizer, to_decode=True) if late_tokenizer else load_tokenizer(files.tokenizer),
        max_model_len=max_model_len,
        vocab_size=files.config["vocab_size"],
        max_num_seqs=runner.max_num_seqs,
        max_num_batched_tokens=runner.max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        async_scheduling=config.async_scheduling,
        model=files,
        facts={name: (fact.value, fact.source) for name, fact in runner.facts().items()},
    )
