"""Job files: valid ones with keys, values and bytes changed, and YAML that was made to hurt."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

import yaml

from batchinfer.testing.fuzzing.case import INPUT_FOLDER, NASTY_TEXTS, Case, mutated

_ROWS = b"".join(b'{"id": %d, "text": "good row %d", "max": %d}\n' % (i, i, i + 20) for i in range(4))
_CHATS = b"".join(
    b'{"id": %d, "messages": [{"role": "user", "content": "good row %d"}], "max": 9}\n' % (i, i) for i in range(4)
)
_VALID: tuple[dict[str, Any], ...] = (
    {
        "name": "first",
        "model": {"path": "fake://echo?max_model_len=4096"},
        "input": {"path": "in", "prompt": "Say: {text}"},
        "output": {"path": "out"},
        "sampling": {"temperature": 0.7, "top_p": 0.9, "seed": 3, "max_tokens": 50, "stop": ["END", "\n\n"]},
    },
    {
        "model": {"path": "fake://hash?max_model_len=512&eos_rate=0.01", "dtype": "auto", "quantization": "auto"},
        "input": {"path": "in", "prompt_column": "text", "format": "jsonl", "limit": 3, "id_column": "id"},
        "output": {"path": "out", "columns": ["id"], "prefix": "out_", "token_ids": True},
        "sampling": {"n": 2, "temperature": 1.0, "logprobs": 3, "logit_bias": {5: -1.0}, "stop_token_ids": [7]},
        "engine": {"max_model_len": 256, "max_num_seqs": 4, "kv_cache_memory": "1GiB", "block_size": 8},
        "cluster": {"workers": 1, "kind": "local"},
        "failure": {"max_failed_rows": 10},
    },
    {
        "model": {"path": "fake://echo"},
        "input": {
            "path": "in",
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "{text}"}],
            "sampling_columns": {"max_tokens": "max"},
            "chat_template_kwargs": {"add_generation_prompt": False},
        },
        "output": {"path": "out"},
    },
    {
        "model": {"path": "fake://echo"},
        "input": {"path": "in", "messages_column": "messages", "chat_template": "default", "control_tokens": "text"},
        "output": {"path": "out"},
        "engine": {"num_threads": 1, "enable_prefix_caching": False},
    },
)
_KEYS = (
    "temprature",
    "Model",
    "path",
    "",
    "x",
    "lora",
    "guided_json",
    "a.b",
    "n" * 300,
    "é",
    "sampling",
    "~",
    "<<",
    "=",
)
_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2**31,
    2**63,
    -(2**64),
    10**40,
    10**400,
    0.0,
    -0.5,
    1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    [],
    {},
    [[]],
    [None],
    [1, "a", {}],
    {"a": {"b": {"c": 1}}},
    {1: 2},
    {None: 1},
    {True: 1},
    {1.5: "x"},
    "1e5",
    "1_000",
    "0x1F",
    "1:30:00",
    "yes",
    "2024-01-01",
    "4GiB",
    "999999999999999999GiB",
    "-1GiB",
    "1.5.5GiB",
    "/",
    "~",
    "~nobody-by-this-name/x",
    ".",
    "..",
    "file://",
    "s3://bucket/x",
    "http://",
    "memory://x",
    "nosuch://x",
    "in::split",
    "in/*",
    "in/[",
    "**",
    "\0",
    "a\0b",
    "\ud800",
    "{",
    "}}",
    "{}",
    "{text!r}",
    "{text:>10000000}",
    "{text.a.b.c}",
    "{{text}}",
    *NASTY_TEXTS,
)
_YAML = (
    "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\n"
    "d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d]\nf: [*e,*e,*e,*e,*e,*e,*e,*e,*e]\n",
    "a: &a {b: *a}\n",
    "a: &a\n  <<: *a\n",
    "a: &a {x: 1}\nb: &b {<<: [*a,*a,*a,*a]}\nc: &c {<<: [*b,*b,*b,*b]}\nname: {<<: [*c,*c]}\n",
    "<<: 5\n",
    "<<: [1, 2]\n",
    "name: !!python/object/apply:os.system ['true']\n",
    "name: !!python/name:os.system\n",
    "name: !!int x\n",
    "name: !!int ''\n",
    "name: !!float .\n",
    "name: !!bool maybe\n",
    "name: !!binary '%%%'\n",
    "name: !!binary 'aGVsbG8='\n",
    "name: !!timestamp yesterday\n",
    "name: !!set {a, b}\n",
    "name: !!omap [a: 1]\n",
    "name: !!pairs [a: 1]\n",
    "name: !!map []\n",
    "name: !!seq {}\n",
    "name: !!str {a: 1}\n",
    "name: !own thing\n",
    "name: !!null x\n",
    "name: 190:20:30\n",
    "name: 0b102\n",
    "name: 0o17\n",
    "name: 089\n",
    "name: .nan\n",
    "name: 1__0\n",
    "name: 0x\n",
    "name: " + "9" * 5000 + "\n",
    "name: 1e99999\n",
    "name: " + "[" * 3000 + "]" * 3000 + "\n",
    "name: " + "{a: " * 3000 + "}" * 3000 + "\n",
    "".join("  " * i + "a:\n" for i in range(1500)),
    "? [a, b]\n: 1\n",
    "? {a: b}\n: 1\n",
    "? !!binary aGk=\n: 1\n",
    "? 2024-01-01\n: 1\n",
    "--- \nname: a\n--- \nname: b\n",
    "--- !own\nname: a\n",
    "%YAML 9.9\n---\nname: a\n",
    "%TAG ! tag:x,2000:\n---\nname: !y a\n",
    "name: |\n  text\n bad\n",
    "name: >99\n  text\n",
    "name: 'open\n",
    'name: "\\x"\n',
    'name: "\\uD800"\n',
    'name: "\\U00110000"\n',
    "name: *nobody\n",
    "name: &a &b c\n",
    "\tname: a\n",
    "name: a\nname: b\n",
    "name: @a\n",
    "name: `a`\n",
    "5\n",
    "[]\n",
    "''\n",
    "# nothing\n",
    "null\n",
    "name: a: b\n",
    "model\n",
    "name: \u2028a\u2028\n",
    "name: \x85a\n",
)
_OVERRIDES = (
    "",
    "=",
    "a",
    "a=",
    ".=1",
    "a..b=1",
    "sampling.temperature=nan",
    "sampling.temperature=1e-3",
    "sampling.logit_bias.5=1",
    "sampling.logit_bias.999999999999=1",
    "sampling.max_tokens=[",
    "sampling=5",
    "sampling.temperature.x=1",
    "model.path=",
    "name=a: b: c",
    "name=*x",
    "name=!!python/name:os.system",
    "input.limit=99999999999999999999999",
    "input.limit=2",
    "input.prompt={nosuch}",
    "input.prompt={",
    "engine.kv_cache_memory=4 parsecs",
    "output.columns=[nosuch]",
    "output.columns=[id, id]",
    "output.prefix=\0",
    "0.1.2=3",
    "name=\ud800",
    "a" * 5000 + "=1",
    ".".join("a" * 300) + "=1",
)


def make(rng: Random) -> Case:
    """A job over four good rows."""
    valid = rng.choice(_VALID)
    maker = rng.choice((_values_changed, _values_changed, _values_changed, _bytes_changed, _yaml, _encoded))
    content, note = maker(rng, copy.deepcopy(valid))
    overrides: tuple[str, ...] = ()
    if rng.random() < 0.25:
        overrides = tuple(rng.choice(_OVERRIDES) for _ in range(rng.choice((1, 1, 2))))
        note += f"; --set {overrides!r}"[:200]
    rows = _CHATS if "messages_column" in valid["input"] else _ROWS
    return Case(
        kind="jobfile",
        what=note,
        job=content,
        files={f"{INPUT_FOLDER}/rows-0.jsonl": rows},
        overrides=overrides,
        refusable=True,
    )


def _dumped(rng: Random, job: Any) -> bytes:
    """As people write it, or as programs do."""
    if rng.random() < 0.7:
        try:
            return yaml.safe_dump(
                job, allow_unicode=rng.random() < 0.5, default_flow_style=rng.choice((False, None))
            ).encode("utf-8", "surrogatepass")
        except (yaml.YAMLError, ValueError):
            pass
    try:
        return json.dumps(_with_text_keys(job)).encode()
    except RecursionError:  # nested deeper than Python can write
        return b'{"model": ' + b"[" * 5_000


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _with_text_keys(item) for key, item in value.items()}
    return [_with_text_keys(item) for item in value] if isinstance(value, list) else value


def _values_changed(rng: Random, job: dict[str, Any]) -> tuple[bytes, str]:
    """Another value somewhere, a key more, a key less, a key elsewhere."""
    notes = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        section = rng.choice([job, *(value for value in job.values() if isinstance(value, dict))])
        key = rng.choice(list(section)) if section else "x"
        match rng.randrange(6):
            case 0:
                key = rng.choice(_KEYS)
                section[key] = rng.choice(_VALUES)
            case 1:
                section.pop(key, None)
            case 2:
                own = section.pop(key, None)
                name = str(key)
                section[rng.choice((name.upper(), name + " ", name[:-1], f" {name}", name * 2))] = own
            case 3 if section is not job:
                known = rng.choice(list(_SETTINGS))
                job.setdefault(known, {})
                if isinstance(job[known], dict):
                    key = rng.choice(_SETTINGS[known])
                    job[known][key] = rng.choice(_VALUES)
            case _:
                section[key] = rng.choice(_VALUES)
        notes.append(f"{key!r} changed"[:80])
    return _dumped(rng, job), "; ".join(notes)


_SETTINGS = {
    "sampling": (
        "n",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "logit_bias",
        "seed",
        "stop",
        "max_tokens",
        "min_tokens",
        "stop_token_ids",
        "ignore_eos",
        "logprobs",
        "prompt_logprobs",
        "presence_penalty",
    ),
    "engine": (
        "device",
        "tensor_parallel_size",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "kernels",
        "kv_cache_memory",
        "enable_prefix_caching",
        "block_size",
        "split_size",
        "num_threads",
        "deterministic",
    ),
    "cluster": ("kind", "workers", "worker_timeout_s", "hang_timeout_s", "takeover_timeout_s"),
    "failure": ("max_failed_rows", "on_too_long"),
    "input": (
        "path",
        "format",
        "limit",
        "storage_options",
        "prompt",
        "prompt_column",
        "messages_column",
        "messages",
        "id_column",
        "chat_template",
        "chat_template_kwargs",
        "tools_column",
        "sampling_columns",
        "control_tokens",
    ),
    "output": ("path", "format", "columns", "prefix", "token_ids"),
    "model": ("path", "revision", "tokenizer", "dtype", "quantization", "kv_cache_dtype"),
}


def _bytes_changed(rng: Random, job: dict[str, Any]) -> tuple[bytes, str]:
    return mutated(rng, _dumped(rng, job)), "bytes changed"


def _yaml(rng: Random, job: dict[str, Any]) -> tuple[bytes, str]:
    """Hostile YAML before, after or inside the rest."""
    piece = rng.choice(_YAML)
    rest = yaml.safe_dump(job)
    text = rng.choice(
        (piece, piece + rest, rest + piece, rest.replace("seed: 3", piece.strip()), rest + "input:\n  " + piece)
    )
    return text.encode(), f"YAML: {piece[:60]!r}"


def _encoded(rng: Random, job: dict[str, Any]) -> tuple[bytes, str]:
    text = yaml.safe_dump(job).replace("first", "erste é")
    encoding = rng.choice(("utf-16", "utf-32", "latin-1", "utf-8-sig", "cp037", "utf-16-le"))
    return text.encode(encoding), f"encoded as {encoding}"
