"""`LLM`: the engine for a list of prompts, with the names that vLLM's users know.

Responsible for: texts to token ids (special tokens in the text count, as there), defaults, order of results, random
streams of prompts that have no row. Not for: datasets, files, resuming (`batchinfer.submit`).
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from numbers import Integral
from typing import Any, Literal, TypeAlias

from batchinfer.config import EngineConfig
from batchinfer.engine.build import load_engine
from batchinfer.errors import ConfigError
from batchinfer.garbage import collected_rarely
from batchinfer.text import PromptRenderer, PromptSpec, prepare_rows
from batchinfer.types.request import Request, RequestOutput, SamplingParams
from batchinfer.types.rows import ErrorClass, RowError
from batchinfer.types.streams import row_key

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
Messages: TypeAlias = Sequence[Mapping[str, Any]]

_OPTIONS = tuple(field.name for field in fields(EngineConfig))
_HINTS = {
    "cpu_offload_gb": "it is not there yet",
    "swap_space": "there is no swapping: pre-empted sequences are recomputed",
    "enforce_eager": "use cuda_graphs=False",
    "trust_remote_code": "leave it out: no code is ever loaded from a model",
    "load_format": "leave it out: safetensors and GGUF are told apart by their files",
    "download_dir": "set HF_HOME",
    "disable_log_stats": "leave it out: nothing is printed; see LLM.stats()",
    "pipeline_parallel_size": "it is planned and not there yet",
    "data_parallel_size": "use cluster.workers in a job",
    "enable_lora": "LoRA is planned and not there yet",
    "speculative_config": "speculation is planned and not there yet",
    "enable_chunked_prefill": "leave it out: prefill is always chunked by max_num_batched_tokens",
}


class LLM:
    """A model, ready to complete prompts.

        llm = LLM(model="models/SmolLM2-135M-Instruct.Q4_1.gguf", max_model_len=2048)
        for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=16)):
            print(output.outputs[0].text)

    The options are those of EngineConfig. An output depends on its prompt, its settings and its random stream, never
    on the other prompts. The stream follows from SamplingParams.seed where it is given, so that the same prompt and
    seed give the same output wherever they stand; else from this LLM's `seed` and from how many prompts it was given
    before, so that prompts given in one call or in several have the same outputs.

    A call that is interrupted keeps nothing. Who wants to go on from what was generated uses `engine`, with requests of
    their own (`Engine.partial_outputs`), or `batchinfer.submit`, which does that at SIGTERM.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        revision: str | None = None,
        dtype: str = "auto",
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        device: str = "auto",
        deterministic: bool = True,
        cuda_graphs: bool | Literal["auto"] = "auto",
        async_scheduling: bool | Literal["auto"] | None = "auto",
        tensor_parallel_size: int = 1,
        max_model_len: int | None = None,
        max_num_seqs: int | Literal["auto"] | None = "auto",
        max_num_batched_tokens: int | Literal["auto"] | None = "auto",
        kv_cache_memory: int | Literal["auto"] | None = "auto",
        gpu_memory_utilization: float = 0.9,
        enable_prefix_caching: bool = True,
        block_size: int = 16,
        split_size: int = 256,
        kernels: str = "auto",
        seed: int = 0,
        num_threads: int | None = None,
        **unknown: Any,
    ) -> None:
        for name in unknown:
            raise ConfigError(_unknown_option(name))
        self.config = EngineConfig(
            model=os.fspath(model),
            tokenizer=None if tokenizer is None else os.fspath(tokenizer),
            revision=revision,
            dtype=dtype,
            quantization=quantization or "auto",
            kv_cache_dtype=kv_cache_dtype,
            device=device,
            deterministic=deterministic,
            cuda_graphs=cuda_graphs,
            async_scheduling="auto" if async_scheduling is None else async_scheduling,
            tensor_parallel_size=tensor_parallel_size,
            max_model_len=max_model_len,
            max_num_seqs="auto" if max_num_seqs is None else max_num_seqs,
            max_num_batched_tokens="auto" if max_num_batched_tokens is None else max_num_batched_tokens,
            kv_cache_memory="auto" if kv_cache_memory is None else kv_cache_memory,
            gpu_memory_utilization=gpu_memory_utilization,
            enable_prefix_caching=enable_prefix_caching,
            block_size=block_size,
            split_size=split_size,
            kernels=kernels,
            seed=seed,
            num_threads=num_threads,
        )
        self._seed = seed
        self._next_request_id = 0
        self.engine = load_engine(self.config)

    # ---------------------------------------------------------------- prompts in, outputs out

    @collected_rarely()
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,  # for those who come from vLLM; nothing is shown either way
    ) -> list[RequestOutput]:
        """Completes prompts; the results are in their order, one each.

        A prompt is a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": [...]}. Without
        sampling_params the model's own defaults are used (`default_sampling_params`). A prompt that can't be
        completed has an output whose `error` says why and whose `outputs` is empty; the others are not touched.
        Raises ConfigError on arguments that make no sense together, EngineError when the model fails as a whole.
        """
        listed = _as_list(prompts)
        sampling = self._sampling_of(sampling_params, len(listed))
        texts = [_text_of(prompt) for prompt in listed]
        rows = [{"prompt": text} for text in texts if text is not None]
        prepared = iter(self._prepare(PromptSpec(prompt_column="prompt"), rows))
        ids = [
            next(prepared) if text is not None else _ids_of(prompt) for prompt, text in zip(listed, texts, strict=True)
        ]
        return self._run(ids, texts, sampling)

    @collected_rarely()
    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answers one conversation, or a list of them; results, errors and defaults as with `generate`.

        A conversation is a list of {"role": ..., "content": ...}. `chat_template` is the name of one of the model's
        templates or a template's text. Control tokens that are spelled in a message's text stay text.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise ConfigError(
                "messages must be a conversation (a list of {'role': ..., 'content': ...}) or a list of these, "
                f"got {type(messages).__name__}"
            )
        conversations: list[Any] = list(messages)
        if conversations and isinstance(conversations[0], Mapping):
            conversations = [conversations]
        sampling = self._sampling_of(sampling_params, len(conversations))
        spec = PromptSpec(
            messages_column="messages",
            chat_template=chat_template,
            chat_template_kwargs={"add_generation_prompt": add_generation_prompt, **(chat_template_kwargs or {})},
            tools_column="tools" if tools else None,
        )
        shared = {"tools": list(tools)} if tools else {}
        rows = [{"messages": conversation, **shared} for conversation in conversations]
        return self._run(self._prepare(spec, rows), [None] * len(rows), sampling)

    def stats(self) -> dict[str, float]:
        """Counts and times since this LLM was built (see EngineStats)."""
        stats = self.engine.stats()
        return {field.name: getattr(stats, field.name) for field in fields(stats)}

    def get_tokenizer(self) -> Any:
        return self.engine.tokenizer

    def default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config suggests; greedy where it suggests nothing."""
        model = self.engine.model
        suggested = model.suggested_sampling if model is not None else {}
        return SamplingParams(**{"temperature": 0.0, **suggested})

    get_default_sampling_params = default_sampling_params

    def close(self) -> None:
        """Frees the model and its memory."""
        self.engine.close()

    # ---------------------------------------------------------------- parts

    def _prepare(self, spec: PromptSpec, rows: Sequence[Mapping[str, Any]]) -> list[Sequence[int] | RowError]:
        engine = self.engine
        tokenizer, model = engine.tokenizer, engine.model
        assert tokenizer is not None
        assert model is not None
        if not rows:
            return []
        renderer = PromptRenderer(spec, tokenizer, model.chat_templates)
        prepared = prepare_rows(renderer, tokenizer, rows, max_model_len=engine.max_model_len)
        return [row if isinstance(row, RowError) else row.token_ids for row in prepared]

    def _sampling_of(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if given is None:
            return [self.default_sampling_params()] * count
        if isinstance(given, SamplingParams):
            return [given] * count
        if not isinstance(given, Sequence) or isinstance(given, str):
            raise ConfigError(f"sampling_params must be SamplingParams or a list of them, got {type(given).__name__}")
        listed = list(given)
        if len(listed) != count:
            raise ConfigError(
                f"generate got {count} prompts and {len(listed)} sampling_params: give one for all or one each"
            )
        for params in listed:
            if not isinstance(params, SamplingParams):
                raise ConfigError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
        return listed

    def _run(
        self,
        ids: Sequence[Sequence[int] | RowError],
        texts: Sequence[str | None],
        sampling: Sequence[SamplingParams],
    ) -> list[RequestOutput]:
        engine = self.engine
        ends = engine.model.eos_token_ids if engine.model is not None else frozenset()
        outputs: dict[int, RequestOutput] = {}
        first = self._next_request_id
        self._next_request_id += len(ids)
        places = list(range(len(ids)))
        # Prompts that share a prefix run together, so that it is computed once and can be dropped afterwards.
        keys: list[tuple[int, ...]] = [() if isinstance(prompt, RowError) else tuple(prompt) for prompt in ids]
        todo = iter(sorted(places, key=keys.__getitem__))
        most = 2 * engine.scheduler.max_num_seqs
        left = True
        try:
            while left or engine.has_unfinished():
                while left and engine.num_unfinished < most:
                    place = next(todo, None)
                    if place is None:
                        left = False
                        break
                    prompt, params = ids[place], sampling[place]
                    if isinstance(prompt, RowError):
                        outputs[place] = RequestOutput(
                            request_id=first + place, prompt_token_ids=(), error=prompt, prompt=texts[place]
                        )
                        continue
                    engine.add_request(
                        Request(
                            request_id=first + place,
                            prompt_token_ids=prompt,
                            sampling=params,
                            stream_key=self._stream_key(first + place, params),
                            eos_token_ids=ends,
                        )
                    )
                for output in engine.step():
                    outputs[output.request_id - first] = output
        except BaseException:
            # Interrupted or broken: nothing of this call may turn up in the next.
            for place in places:
                engine.abort(first + place)
            raise
        return [replace(outputs[place], prompt=texts[place]) for place in places]

    def _stream_key(self, index: int, params: SamplingParams) -> int:
        if params.seed is not None:
            return row_key(params.seed, "", 0)
        return row_key(self._seed, "prompt", index)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise ConfigError(
            f"prompts must be a text, a list of token ids, a dict or a list of these, got {type(prompts).__name__}"
        )
    if prompts and _as_ids(prompts) is not None:
        return [prompts]
    return list(prompts)


def _as_ids(values: Sequence[Any]) -> list[int] | None:
    """The values as token ids, numpy's whole numbers among them; None where they are something else."""
    if all(type(value) is int for value in values):
        return list(values)
    if all(isinstance(value, Integral) and not isinstance(value, bool) for value in values):
        return [int(value) for value in values]
    return None


def _text_of(prompt: Any) -> str | None:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping) and "prompt_token_ids" not in prompt and isinstance(prompt.get("prompt"), str):
        text: str = prompt["prompt"]
        return text
    return None


def _ids_of(prompt: Any) -> list[int] | RowError:
    """Token ids of a prompt that is no text. What is neither is this prompt's error, not the call's."""
    ids: Any = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
    if hasattr(ids, "tolist"):  # an array or a tensor
        ids = ids.tolist()
    if isinstance(ids, Sequence) and not isinstance(ids, (str, bytes)):
        found = _as_ids(ids)
        if found is not None:
            return found
    shown = f"a dict with the keys {sorted(map(str, prompt))}" if isinstance(prompt, Mapping) else repr(prompt)[:80]
    return RowError(
        ErrorClass.INVALID_PROMPT,
        f"a prompt is a text, a list of token ids, {{'prompt': ...}} or {{'prompt_token_ids': [...]}}; got {shown}",
    )


def _unknown_option(name: str) -> str:
    if name in _HINTS:
        return f"LLM has no option {name!r}: {_HINTS[name]}"
    near = difflib.get_close_matches(name, _OPTIONS, n=1)
    return f"LLM has no option {name!r}" + (
        f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(_OPTIONS)}"
    )
